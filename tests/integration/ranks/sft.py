"""What supervised training makes of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from asyncrl.schema import decode_batch
from asyncrl.trainer import policy
from tests.integration.ranks.updates import Figures, in_float64, of_batch


def one_batch(folder: Path, layouts: dict[int, dict[str, dict]]) -> dict[str, tuple[Figures, dict[str, Tensor]]]:
    """Train one batch of mode=sft in float64, in each layout for as many processes as there are: loss and gradients
    must be those of transformers. Returns the figures, and the gradients of an exporting rank by HF name."""
    found = {}
    for layout, config, where, descent in in_float64(folder, layouts):
        one = policy.Policy(config, folder / "model", where)
        given = one.batches(lambda: pytest.fail("supervised training asked for a server of batches"))
        assert given
        data = [given.batch(0, interrupt=lambda: False) if where.is_first else b""]
        dist.broadcast_object_list(data, src=0)
        figures = of_batch(one, decode_batch(data[0]), config.trainer.batch_parts)
        found[layout] = figures, descent.gradients[0] if where.exports else {}
    return found
