"""A rank's packs have rows that its matrix products can take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.algo.balance import Costs
from asyncrl.algo.samples import Sample
from asyncrl.trainer.microbatches import packs_of_rank
from tests.fakes import tiny_config

GROUPS = [[Sample(list(range(3, 8)), list(range(n)), [True] * n, 0, 0) for n in (5, 9)]]


@pytest.mark.parametrize(("recipe", "rows"), [("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_fp8_products_of_every_rank_have_a_multiple_of_rows(recipe: str, rows: int, tp: int, cp: int) -> None:
    layout = {"trainer.tensor_parallel": tp, "trainer.sequence_parallel": tp > 1, "trainer.context_parallel": cp}
    fp8 = {"trainer.dtype": "bfloat16", "trainer.fp8": {"format": "hybrid", "recipe": recipe}}
    trainer = tiny_config(**layout, **fp8).trainer
    for rank in range(cp):
        cpu = torch.device("cpu")
        place: Any = SimpleNamespace(tp=tp, cp=cp, pp=1, dp=1, etp=1, ep=1, cp_rank=rank, dp_rank=0, device=cpu)
        for pack in packs_of_rank(GROUPS, trainer, place, Costs()) + packs_of_rank([], trainer, place, Costs()):
            assert pack.num_tokens % (rows * tp) == 0
