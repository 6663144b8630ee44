"""How often an update makes the host wait for the device. A new `.item()` in a loop over micro-batches fails here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cuda_stub.step import DP, EP, ETP, PP, SP, TP, VPP, Case

AN_UPDATE = 1
"""The sums and columns of the batch, in one copy (trainer/microbatches.py)."""
A_STEP = 2
"""Of each optimizer step: the norm of the gradient, and Megatron's number of tokens."""
AN_ARRIVAL = 2
"""Of each tensor from another pipeline stage: Megatron reads its shape, and waits for the device where it does not
overlap communication."""
A_LAYER = 8
"""Of each layer with routed experts and micro-batch: five counts of tokens and an event after their copies, and two
selections by a mask, which count their results. (TransformerEngine's layers need no mask.)"""


def waits(found: dict[str, Any], update: int) -> int:
    """Return the number of waits of an update."""
    return sum(found["waits"][update].values())


@pytest.mark.parametrize("tokens", [512, 8192], ids=["many micro-batches", "one micro-batch"])
@pytest.mark.parametrize("mini_batches", [1, 4])
def test_a_dense_update_waits_once_and_twice_for_each_step(
    tokens: int, mini_batches: int, step: Callable[[Case], dict[str, Any]]
) -> None:
    changes = {TP: 2, SP: True, DP: 2, "trainer.micro_batch_tokens": tokens, "algo.mini_batches": mini_batches}
    found = step(Case("qwen3", changes=changes, answers=120))
    assert (max(map(len, found["passes"])) > 1) == (tokens == 512)
    for update in (0, 1):
        scored = int(mini_batches > 1)  # the policy that the steps start from
        assert waits(found, update) == AN_UPDATE * (1 + scored) + A_STEP * mini_batches, found["waits"]


@pytest.mark.parametrize("rank", range(3))
def test_a_stage_waits_for_each_arrival(rank: int, step: Callable[[Case], dict[str, Any]]) -> None:
    found = step(Case("qwen3", layers=6, changes={PP: 3}, rank=rank))
    arrivals = len(found["passes"][0]) * (2 if rank == 1 else 1)
    assert waits(found, 0) <= AN_UPDATE + A_STEP + AN_ARRIVAL * arrivals + arrivals, found["waits"]


@pytest.mark.parametrize("changes", [{}, {TP: 2, SP: True, DP: 2, EP: 4, ETP: 1}, {PP: 2, VPP: 2, DP: 2, EP: 2}])
def test_routed_experts_wait_a_bounded_number_of_times(
    changes: dict[str, Any], step: Callable[[Case], dict[str, Any]]
) -> None:
    base = Case("qwen3_moe", changes=changes)
    found = step(replace(base, splits="skewed"))
    layers = base.layers // changes.get(PP, 1)
    micro_batches = len(found["passes"][0])
    allowed = AN_UPDATE + 2 * A_STEP + A_LAYER * layers * micro_batches
    if PP in changes:
        allowed += AN_ARRIVAL * 2 * changes[VPP] * micro_batches
    assert waits(found, 0) <= allowed, (allowed, found["waits"])
