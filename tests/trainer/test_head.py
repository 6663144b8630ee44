"""Log-probability and entropy a chunk of rows at a time, on one rank; tests/integration/test_head.py splits them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.trainer.head import Head

ROWS, WIDTH, VOCAB, PADDED, TARGETS = 23, 5, 31, 33, 40
ALONE: Any = SimpleNamespace(cp=1, tp=1, tp_rank=0)


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Any]:
    """Hidden states, a weight with padding, and targets: some share a row, and one row has none."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    rows = torch.randint(1, ROWS, (TARGETS,), generator=draw)
    targets = torch.randint(0, VOCAB, (TARGETS,), generator=draw)
    rows[1], targets[1] = rows[0], targets[0]  # siblings may begin with the same token
    return hidden.requires_grad_(), weight.requires_grad_(), SimpleNamespace(row_of_target=rows, targets=targets)


def factors() -> tuple[Tensor, Tensor]:
    """Return factors of a differentiated function: the sum of factor * value over targets, for both values."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(TARGETS, generator=draw).double(), torch.randn(TARGETS, generator=draw).double()


def scored(hidden: Tensor, weight: Tensor, pack: Any, chunk_rows: int = 7, temperature: float = 0.7) -> list[Tensor]:
    """Log-probabilities, entropy, and the gradients of hidden states and weight."""
    logprobs, entropy = Head(hidden, weight, VOCAB, chunk_rows, ALONE).score(pack, temperature, entropy=True)
    assert entropy is not None
    of_logprobs, of_entropy = factors()
    ((logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


def plain(hidden: Tensor, weight: Tensor, pack: Any, temperature: float = 0.7) -> tuple[Tensor, Tensor]:
    """The definition."""
    every = torch.log_softmax(hidden @ weight[:VOCAB].t() / temperature, -1)[pack.row_of_target]
    return every.gather(1, pack.targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 7, ROWS, 1000])
def test_values_and_gradients_are_those_of_log_softmax(chunk_rows: int, temperature: float) -> None:
    hidden, weight, pack = case()
    found = scored(hidden, weight, pack, chunk_rows, temperature)
    hidden, weight, pack = case()
    logprobs, entropy = plain(hidden, weight, pack, temperature)
    of_logprobs, of_entropy = factors()
    ((logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()).backward()
    for mine, theirs in zip(found, (logprobs, entropy, hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    assert not found[3][VOCAB:].any()  # nothing pulls at the padding


def test_the_size_of_chunks_changes_nothing() -> None:
    outcomes = [scored(*case(), chunk_rows) for chunk_rows in (1, 2, 7, 22, ROWS)]
    for one, other in pairwise(outcomes):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_forbidden_tokens_have_no_probability_and_no_gradient() -> None:
    hidden, weight, pack = case()
    allowed = torch.tensor(
        [one for one in range(VOCAB) if one not in pack.targets.tolist()][2:] + pack.targets.tolist()
    )
    allowed = allowed.unique()
    forbidden = torch.tensor([one for one in range(VOCAB) if one not in allowed.tolist()])
    assert len(forbidden)
    logprobs, entropy = Head(hidden, weight, VOCAB, 7, ALONE, forbidden=forbidden).score(pack, 0.7, entropy=True)
    every = ((hidden @ weight[allowed].t()) / 0.7).log_softmax(-1)[pack.row_of_target]
    expected = every.gather(1, torch.searchsorted(allowed, pack.targets)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    assert entropy is not None
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1), rtol=0, atol=1e-13)
    mine = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected.sum() - (every.exp() * every).sum(), (hidden, weight))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences() -> None:
    hidden, weight, pack = case()

    def values(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logprobs, entropy = Head(hidden, weight, VOCAB, 7, ALONE).score(pack, 0.7, entropy=True)
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(values, (hidden, weight), eps=1e-6, atol=1e-8, rtol=1e-7, fast_mode=True)


def test_without_entropy_logprobs_are_the_same() -> None:
    hidden, weight, pack = case()
    head = Head(hidden, weight, VOCAB, 7, ALONE)
    alone, nothing = head.score(pack, 0.7)
    both, entropy = head.score(pack, 0.7, entropy=True)
    assert nothing is None
    assert entropy is not None
    assert alone.equal(both)
    for value, expected in zip((alone, both, entropy), (*plain(*case())[:1] * 2, plain(*case())[1]), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-13)
    mine = torch.autograd.grad(entropy.sum(), (hidden, weight))
    theirs = torch.autograd.grad(plain(hidden, weight, pack)[1].sum(), (hidden, weight))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_the_weights_gradient_is_added_to_megatrons_buffer() -> None:
    expected = scored(*case())[3]
    hidden, weight, pack = case()
    buffer = weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    logprobs, entropy = Head(hidden, weight, VOCAB, 7, ALONE).score(pack, 0.7, entropy=True)
    assert entropy is not None
    of_logprobs, of_entropy = factors()
    ((logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()).backward()
    assert weight.grad is None
    torch.testing.assert_close(buffer.detach() - 1, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("buffered", [False, True])
def test_bfloat16_sums_in_float32(buffered: bool) -> None:
    hidden, weight, pack = case(torch.bfloat16)
    if buffered:
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    logprobs, entropy = Head(hidden, weight, VOCAB, 7, ALONE).score(pack, 0.7, entropy=True)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs.sum() + entropy.sum()).backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact_logits = (hidden @ weight.t()).detach().double()[:, :VOCAB] / 0.7  # rounded, as the engine's
    every = torch.log_softmax(exact_logits, -1)[pack.row_of_target]
    torch.testing.assert_close(logprobs.double(), every.gather(1, pack.targets[:, None])[:, 0], rtol=0, atol=1e-5)
    sum(value.sum() for value in plain(exact_hidden, exact_weight, pack)).backward()  # type: ignore[union-attr]
    gradient = weight.main_grad if buffered else weight.grad  # type: ignore[attr-defined]
    for mine, theirs in ((hidden.grad, exact_hidden.grad), (gradient, exact_weight.grad)):
        assert theirs is not None
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))


def test_a_pack_without_targets_has_a_gradient_of_zero() -> None:
    """Such a pack fills a place without work, because ranks beside it wait for its backward pass."""
    hidden, weight, pack = case()
    pack = SimpleNamespace(row_of_target=pack.row_of_target[:0], targets=pack.targets[:0])
    logprobs, entropy = Head(hidden, weight, VOCAB, 7, ALONE).score(pack, 1.0, entropy=True)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, and how many matrix products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default)
        if isinstance(out, Tensor) and not func.is_view and out is not args[0]:
            self.elements = max(self.elements, out.numel())
        return out


def test_no_tensor_exceeds_a_chunk_of_logits() -> None:
    for chunk_rows, chunks in ((ROWS, 1), (12, 2), (6, 4)):
        with _Largest() as seen:
            scored(*case(), chunk_rows)
        assert seen.elements == -(-ROWS // chunks) * PADDED
        assert seen.products == chunks + chunks - 1 + 2 * chunks  # forward, again, and two of backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradient_is_added_without_a_copy(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(200, 8, generator=draw).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(200, 8)  # type: ignore[attr-defined]
    pack: Any = SimpleNamespace(row_of_target=torch.arange(6), targets=torch.arange(6))
    logprobs, _ = Head(hidden, weight, 200, 2, ALONE).score(pack, 1.0)
    with _Largest() as seen:
        logprobs.sum().backward()
    assert seen.elements == 2 * 200
