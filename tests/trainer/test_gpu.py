"""Attention and the output head on a GPU have the values and gradients of their definitions.

The same tests run on a CPU, where attention takes another path (that of its platform).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algo.balance import TOKEN, Costs
from asyncrl.algo.context_parallel_split import bounds_of, part
from asyncrl.algo.pack import Pack, pack
from asyncrl.algo.samples import Sample
from asyncrl.trainer.head import Head
from asyncrl.trainer.tree_attention import attend
from tests.algo.packs import dense

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])

ROWS = {17: (8, 4), 88: (40, 17), 128: (32, 33), 600: (90, 171)}
"""Tokens of a prompt and of each of its three answers, by the number of rows of the pack."""
HEADS = {"of its own": (4, 4, 32, 32), "grouped": (32, 8, 16, 16), "latent": (4, 4, 48, 32)}
"""Query heads, key heads, width of queries and keys, width of values."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference, as a share of the largest expected value."""


def tree(rows: int) -> Pack:
    """A pack of one prompt with three answers, which do not see each other."""
    prompt, length = ROWS[rows]
    answers = [[answer, *range(length - 1)] for answer in range(3)]
    p = pack([[Sample(list(range(prompt)), ids, [True] * length, 0, 0) for ids in answers]])
    assert p.num_tokens == rows
    return p


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    mine, theirs = mine.detach().cpu().double(), theirs.detach()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@on_both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("parts", [1, 2])
def test_attention_and_its_gradient_are_those_of_the_dense_mask(
    parts: int, rows: int, heads: str, dtype: torch.dtype, device: str
) -> None:
    p = tree(rows)
    queries, keys, width, value_width = HEADS[heads]
    shapes = [(queries, width), (keys, width), (keys, value_width), (queries, value_width)]
    draw = torch.Generator().manual_seed(rows)
    *inputs, grad = (torch.randn(rows, *shape, generator=draw).to(dtype) for shape in shapes)
    mine, theirs = ([x.to(where).clone().requires_grad_() for x in inputs] for where in (device, torch.float64))
    scale = 1 / math.sqrt(width)
    expected = dense(*theirs, p, scale)
    expected.backward(grad.double())
    bounds = bounds_of(p, parts, 1, Costs(pair=TOKEN // 50))
    for number in range(parts):
        one = part(p, bounds, number).to(torch.device(device)) if parts > 1 else p.to(torch.device(device))
        own = slice(*one.rows)
        out = attend(mine[0][own], *mine[1:], one, scale)
        out.backward(grad[own].to(device))
        close(out, expected[own], TOLERANCE[dtype])
    for x, y in zip(mine, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        close(x.grad, y.grad, TOLERANCE[dtype])


@on_both
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_head_adds_its_gradient_to_the_buffer(dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(count, 64, generator=draw).to(dtype) for count in (50, 1000)]
    rows, targets = torch.arange(50), torch.randint(0, 1000, (50,), generator=draw)
    hidden, weight = (x.double().requires_grad_() for x in exact)
    expected = torch.log_softmax(hidden @ weight.t() / 8, -1)[rows, targets]
    expected.sum().backward()
    mine, my_weight = (x.to(device).clone().requires_grad_() for x in exact)
    my_weight.main_grad = torch.ones(1000, 64, device=device)  # type: ignore[attr-defined]
    given: Any = SimpleNamespace(row_of_target=rows.to(device), targets=targets.to(device))
    alone: Any = SimpleNamespace(cp=1, tp=1, tp_rank=0)
    logprobs, _ = Head(mine, my_weight, 1000, 20, alone).score(given, 8.0)
    logprobs.sum().backward()
    close(logprobs, expected, TOLERANCE[dtype])
    assert mine.grad is not None
    assert weight.grad is not None
    assert hidden.grad is not None
    close(mine.grad, hidden.grad, TOLERANCE[dtype])
    close(my_weight.main_grad - 1, weight.grad, TOLERANCE[dtype])  # type: ignore[attr-defined]
