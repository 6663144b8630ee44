"""Between micro-batches the host never waits for the device: the losses' code runs on tensors without values.

On the meta device, an operation whose result the host needs (`.item()`, a boolean index, `bincount`) raises, and here
an operation on another device does so, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES
from asyncrl.platforms import here
from asyncrl.settings import Choice
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import TokenAccumulator
from tests.algo.tables import make
from tests.fakes import tiny_config

here().prepare_trainer()

from asyncrl.trainer.objective import Objective  # noqa: E402
from asyncrl.trainer.routing import RouterReplay  # noqa: E402

META = torch.device("meta")
ROWS, VOCAB = 9, 50
PARALLEL: Any = SimpleNamespace(cp=1, tp=1, tp_rank=0, device=META)
MASKS = {"sequence": [0.5, 4.0], "geometric": [0.8, 1.2], "opsm": 0.05, "lag": 2}


class OnlyOnDevice(TorchDispatchMode):
    """Raises when an operation makes a tensor on the host, unless it is a number."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            assert not isinstance(tensor, Tensor) or tensor.device == META or not tensor.dim(), function
        return out


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


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


def test_the_comparison_of_replayed_experts_never_waits() -> None:
    choice = RouterReplay(META)
    choice.given = on_device(ROWS, 2, dtype=torch.int64), on_device(ROWS, dtype=torch.bool)
    with OnlyOnDevice():
        choice.get_replay_topk(on_device(ROWS, 4), 2, None, None, lambda scores, k, **_: scores.topk(k))
