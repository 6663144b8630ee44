"""Tests of log-probability and entropy over a vocabulary split over 1, 2 and 4 processes, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

Tensors = dict[str, Tensor]
VOCAB, TEMPERATURE = 31, 0.7
CHUNK_ROWS = {"one-chunk": 1000, "chunks": 4}
ROWS, WIDTH, TARGETS = 9, 4, 14
DEGREES = [1, 2, 4]  # 31 tokens: the last rank of 2 and of 4 pads its part


@pytest.fixture(scope="module")
def given() -> Tensors:
    """Return what every rank gets."""
    draw = torch.Generator().manual_seed(2)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    return {
        "hidden": normal(ROWS, WIDTH),
        "weight": normal(VOCAB, WIDTH),
        "rows": torch.randint(0, ROWS, (TARGETS,), generator=draw),
        "targets": torch.randint(0, VOCAB, (TARGETS,), generator=draw),
        "of_logprobs": normal(TARGETS),
        "of_entropy": normal(TARGETS),
    }


@pytest.fixture(scope="module")
def outcome(given: Tensors) -> Any:
    """Return the results at a degree of tensor parallelism."""

    @cache
    def run(tp: int) -> dict[str, dict[str, Tensor]]:
        ranks: list[dict[str, dict[str, Tensor]]]
        ranks = run_ranks("passes:head", given, VOCAB, TEMPERATURE, CHUNK_ROWS, world=tp)
        return ranks[0]

    return run


@pytest.mark.parametrize("kind", CHUNK_ROWS)
@pytest.mark.parametrize("tp", DEGREES)
def test_values_and_gradients_are_the_whole_log_softmaxs(tp: int, kind: str, given: Tensors, outcome: Any) -> None:
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_()
    every = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, -1)[given["rows"]]
    logprobs, entropy = every.gather(1, given["targets"][:, None])[:, 0], -(every.exp() * every).sum(-1)
    ((given["of_logprobs"] * logprobs).sum() + (given["of_entropy"] * entropy.square()).sum()).backward()
    found = {name: outcome(tp)[kind][name] for name in ("logprobs", "entropy", "hidden", "weight")}
    assert not found["weight"][VOCAB:].any()
    found["weight"] = found["weight"][:VOCAB]
    expected = {"logprobs": logprobs, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("tp", DEGREES)
def test_gradients_are_those_of_finite_differences(tp: int, outcome: Any) -> None:
    for name, rows in (("hidden", ROWS), ("weight", VOCAB)):
        mine, differences = outcome(tp)["chunks"][name], outcome(tp)["differences"][name]
        torch.testing.assert_close(mine[:rows], differences, rtol=0, atol=1e-8)
