"""Between micro-batches the host never waits for the device: the losses' code runs on tensors without values.

On the meta device, an operation whose result the host needs (`.item()`, a boolean index, `bincount`) raises, and here
an operation on another device does so, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES
from asyncrl.platforms import here
from asyncrl.settings import Choice
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import TokenAccumulator
from tests.algo.tables import make
from tests.fakes import tiny_config
from tests.trainer.host_waits import META, OnlyOnDevice, on_device

here().prepare_trainer()

from asyncrl.trainer.objective import Objective  # noqa: E402

ROWS, VOCAB = 9, 50
PARALLEL: Any = SimpleNamespace(cp=1, tp=1, tp_rank=0, device=META)
MASKS = {"sequence": [0.5, 4.0], "geometric": [0.8, 1.2], "opsm": 0.05, "lag": 2}


@pytest.mark.parametrize("entropy_bonus", [0.0, 0.01])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
def test_a_loss_never_waits(loss: str, correction: str | None, entropy_bonus: float) -> None:
    traits = LOSSES.find(Choice(name=loss)).traits
    if traits.corrects and correction:
        pytest.skip("this loss corrects by itself")
    algo = {
        "loss": loss,
        "correction": correction,
        "mask": MASKS,
        "aggregation": "sequence" if traits.per_sequence else "token",
        "entropy_bonus": entropy_bonus,
    }
    config = tiny_config(**{f"algo.{name}": value for name, value in algo.items()})
    objective = Objective(config.algo, config.rollout)
    table = make([4, 5], [0.0, 1.0]).to(META)
    pack: Any = SimpleNamespace(
        row_of_target=on_device(ROWS, dtype=torch.int64),
        targets=on_device(ROWS, dtype=torch.int64),
        table_rows=on_device(ROWS, dtype=torch.int64),
    )
    hidden, weight = on_device(ROWS, 8).requires_grad_(), on_device(VOCAB, 8).requires_grad_()
    seen = TokenAccumulator(ROWS, PARALLEL)
    with OnlyOnDevice():
        objective.loss(Head(hidden, weight, VOCAB, 4, PARALLEL), pack, table, seen).backward()
