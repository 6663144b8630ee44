"""A model over a pack has the values and gradients that it has over each sequence, whatever is shared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algo.balance import TOKEN, Costs
from asyncrl.algo.context_parallel_split import bounds_of, part
from asyncrl.algo.pack import Pack, pack
from asyncrl.algo.samples import Sample
from asyncrl.extensions.cpu.pack_attention import _windowed
from asyncrl.trainer import tree_attention
from asyncrl.trainer.tree_attention import BLOCK, MOST_GRAPHS, attend, block_mask
from tests.algo.packs import Groups, dense, packs

DTYPES = {torch.float64: 1e-10, torch.float32: 3e-5}


def drawn(p: Pack, seed: int, dtype: torch.dtype, value_width: int = 8) -> list[Tensor]:
    """Queries of four heads, keys and values of two, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 8), (2, 8), (2, value_width), (4, value_width)]
    return [torch.randn(p.num_tokens, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [*DTYPES.items(), (torch.bfloat16, 0.1)])
@given(case=packs(), seed=st.integers(0, 99), value_width=st.sampled_from([8, 6, 10]))
@settings(max_examples=40, deadline=None)
def test_attention_and_its_gradient_are_those_of_the_dense_mask(
    case: tuple, seed: int, value_width: int, dtype: torch.dtype, tolerance: float
) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    *inputs, grad = drawn(p, seed, dtype, value_width)
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = attend(*mine, p, 0.3), dense(*theirs, p, 0.3)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=tolerance)


WINDOWS = st.sampled_from([None, 1, 2, 4, 17, 128])


@given(case=packs(), stretch=st.sampled_from([1, 6]), window=WINDOWS, sunk=st.booleans(), parts=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_windows_and_sinks_are_the_dense_masks(
    case: tuple, stretch: int, window: int | None, sunk: bool, parts: int
) -> None:
    groups, share, _ = case
    longer = [[stretched(one, stretch) for one in group] for group in groups]
    p = pack(longer, share=share, multiple=parts)
    real = len(
        pack(longer, share=share).positions
    )  # padding has position 0, so that the dense mask hides nothing of it
    *inputs, grad = drawn(p, 0, torch.float32)
    grad[real:] = 0
    inputs.append(torch.tensor([-2.0, 0.0, 1.0, 3.0]))
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    expected = dense(*theirs[:3], p, 0.3, window, theirs[3] if sunk else None)
    expected.backward(grad.double())
    bounds = bounds_of(p, parts, 1, Costs(pair=TOKEN // 50))
    for one in [part(p, bounds, number) for number in range(parts)] if parts > 1 else [p]:
        rows = slice(*one.rows)
        out = attend(mine[0][rows], *mine[1:3], one, 0.3, window, mine[3] if sunk else None)
        held = slice(one.rows[0], min(one.rows[1], real))
        torch.testing.assert_close(out[: held.stop - held.start].double(), expected[held], rtol=0, atol=1e-5)
        out.backward(grad[rows])
    for x, y in zip(mine[: 3 + sunk], theirs, strict=False):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=1e-5 * stretch)


def test_windows_pairs_grow_with_the_rows() -> None:
    p = pack([[sample(list(range(2000)), [1])]])
    blocks = [*_windowed(p, 50)[0], *(block for _, block in _windowed(p, 50)[1])]
    assert sum((b.queries[1] - b.queries[0]) * (b.keys[1] - b.keys[0]) for b in blocks) <= 2000 * 2 * 50


def sample(prompt: list[int], tokens: list[int]) -> Sample:
    return Sample(prompt, tokens, [True] * len(tokens), 0, 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(case=packs(), window=WINDOWS, sunk=st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_path_for_gpus_has_the_same_values(case: tuple, window: int | None, sunk: bool) -> None:
    """FlexAttention's own reference runs on CPU, forward only."""
    groups, share, _ = case
    p = pack(groups, share=share)
    q, k, v, _ = drawn(p, 0, torch.float32)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0]) if sunk else None
    with mock.patch.object(tree_attention, "_flex_attention", return_value=flex_attention):
        out = tree_attention._flex(q, k, v, p, 0.3, window, sinks)
    torch.testing.assert_close(out, dense(q, k, v, p, 0.3, window, sinks), rtol=0, atol=3e-5)


def test_short_packs_do_not_take_the_decoding_kernel() -> None:
    """For fewer than 128 rows, torch's own choice is a decoding kernel that fails to compile for many head counts."""
    p = pack([[sample([1, 2], [3])]])
    with mock.patch.object(tree_attention, "_flex_attention") as flex:
        flex.return_value.return_value = torch.zeros(1, 4, p.num_tokens, 8)
        tree_attention._flex(*drawn(p, 0, torch.float32)[:3], p, 0.3)
    assert flex.return_value.call_args.kwargs["kernel_options"]["BACKEND"] == "TRITON"


@given(case=packs(), stretch=st.sampled_from([1, 3, 17, 40]), parts=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_block_masks_are_those_of_all_pairs(case: tuple, stretch: int, parts: int) -> None:
    """Packs have one row to several blocks, and seldom whole blocks."""
    groups, share, _ = case
    p = pack([[stretched(one, stretch) for one in group] for group in groups], share=share, multiple=parts)
    bounds = bounds_of(p, parts, 1, Costs(pair=TOKEN // 50))
    for one in [part(p, bounds, number) for number in range(parts)] if parts > 1 else [p]:
        found = block_mask(one)
        rows, keys = one.rows[1] - one.rows[0], one.num_tokens
        expected = create_block_mask(found.mask_mod, None, None, rows, keys, device="cpu")
        assert found.seq_lengths == expected.seq_lengths
        assert found.BLOCK_SIZE == expected.BLOCK_SIZE
        for name in BLOCKS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@given(case=packs(), stretch=st.sampled_from([3, 17, 40]), window=st.sampled_from([1, 100, 128, 400]))
@settings(max_examples=20, deadline=None)
def test_block_masks_of_windows_leave_out_no_pair_and_no_rule(case: tuple, stretch: int, window: int) -> None:
    """Every block with a pair that attends is there, and those without the rule hold such pairs alone."""
    groups, share, _ = case
    p = pack([[stretched(one, stretch) for one in group] for group in groups], share=share, multiple=2)
    bounds = bounds_of(p, 2, 1, Costs(pair=TOKEN // 50))
    for one in (p, part(p, bounds, 0), part(p, bounds, 1)):
        found = block_mask(one, window)
        rows, keys = one.rows[1] - one.rows[0], one.num_tokens
        pairs = create_mask(found.mask_mod, None, None, rows, keys, device="cpu")[0, 0]
        padded = pad(pairs, (0, -keys % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        full = dense_blocks(found.full_kv_num_blocks, found.full_kv_indices)
        some = dense_blocks(found.kv_num_blocks, found.kv_indices)
        assert not (padded.any(3).any(1) & ~some & ~full).any()
        assert not (full & ~padded.all(3).all(1)).any()


def dense_blocks(count: Tensor, order: Tensor) -> Tensor:
    """Which blocks of keys are chosen for each block of rows."""
    chosen = torch.arange(order.shape[-1]) < count[0, 0][:, None]
    return torch.zeros(order.shape[-2:], dtype=torch.bool).scatter(1, order[0, 0].long(), chosen)


BLOCKS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("q", "kv") for what in ("num_blocks", "indices")
]


def stretched(one: Sample, times: int) -> Sample:
    """Every token several times."""
    prompt, tokens, mask = ([x for x in xs for _ in range(times)] for xs in (one.prompt_ids, one.token_ids, one.mask))
    return replace(one, prompt_ids=prompt, token_ids=tokens, mask=mask)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
def test_block_mask_takes_memory_for_blocks_alone(rows: int) -> None:
    p = pack([[sample(list(range(rows)), [1])]])
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    with Largest():
        block_mask(p)
    blocks = -(-rows // BLOCK)
    assert largest <= 8 * max(blocks * (blocks + 1), blocks * BLOCK)  # of rows, their ends


def test_compiled_graphs_do_not_grow_with_packs() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counter)
    with mock.patch.object(tree_attention, "_flex_attention", return_value=compiled), torch.no_grad():
        for rows in (1, 17, 88, 130, 300, 517, 1000):
            p = pack([[sample(list(range(rows)), [1, 2])]])
            for one in (p, *(part(p, bounds_of(p, 2, 1, Costs(pair=TOKEN // 50)), number) for number in (0, 1))):
                q, k, v, _ = drawn(p, 0, torch.float32)
                tree_attention._flex(q[slice(*one.rows)], k, v, one, 0.3)
    assert counter.frame_count <= 6
    assert 2 * counter.frame_count <= MOST_GRAPHS // 2  # with gradient as many again, and room for coincidences


# --- a whole model ------------------------------------------------------------------------------------------

VOCAB, WIDTH, HEADS, LAYERS = 23, 16, 2, 3


def model(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A small transformer's weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (VOCAB, WIDTH), "head": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{name}{layer}": (WIDTH, WIDTH) for name in ("q", "k", "v", "o", "up", "down")}
    found = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) / 4 for name, shape in shapes.items()}
    return {name: weight.to(dtype).requires_grad_() for name, weight in found.items()}


def hidden(w: dict[str, Tensor], token_ids: Tensor, positions: Tensor, attention: object) -> Tensor:
    """[N, width]; `attention` takes and gives [N, heads, d]."""
    frequencies = torch.arange(WIDTH, dtype=w["embed"].dtype) / WIDTH + 0.1
    x = w["embed"][token_ids]
    x = x + torch.sin(positions[:, None] * frequencies)
    for layer in range(LAYERS):
        n = torch.nn.functional.rms_norm(x, (WIDTH,))
        q, k, v = ((n @ w[f"{name}{layer}"]).unflatten(1, (HEADS, -1)) for name in "qkv")
        x = x + attention(q, k, v).flatten(1) @ w[f"o{layer}"]
        x = x + torch.tanh(x @ w[f"up{layer}"]) @ w[f"down{layer}"]
    return x


def loss_of_pack(w: dict[str, Tensor], p: Pack, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities by row of the table, and a loss that gives every trained token a weight of its own."""
    scale = 1 / math.sqrt(WIDTH / HEADS)
    x = hidden(w, p.token_ids, p.positions, lambda q, k, v: attend(q, k, v, p, scale))
    logprobs = torch.log_softmax(x[p.logit_rows] @ w["head"].T, -1)[p.row_of_target, p.targets]
    by_row = torch.zeros(len(weights), dtype=logprobs.dtype).index_add(0, p.table_rows, logprobs)
    return by_row, (weights[p.table_rows] * logprobs).sum()


def loss_apart(w: dict[str, Tensor], groups: Groups, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one plain causal pass over each sequence."""
    by_row, loss = torch.zeros_like(weights), torch.zeros((), dtype=weights.dtype)
    for one in (s for group in groups for s in group):
        ids = torch.tensor(one.prompt_ids + one.token_ids)
        x = hidden(w, ids, torch.arange(len(ids)), causal)
        logprobs = torch.log_softmax(x @ w["head"].T, -1)[len(one.prompt_ids) - 1 : -1]
        own = logprobs.gather(1, torch.tensor(one.token_ids, dtype=torch.int64)[:, None])[:, 0]
        own = own[torch.tensor(one.mask, dtype=torch.bool)]
        rows = slice(one.first_row, one.first_row + one.num_trained)
        by_row[rows] = own.detach()
        loss = loss + (weights[rows] * own).sum()
    return by_row, loss


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(WIDTH / HEADS)
    ahead = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(ahead, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items())
@given(case=packs(), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_model_has_values_and_gradients_of_sequences(
    case: tuple, seed: int, dtype: torch.dtype, tolerance: float
) -> None:
    groups, share, multiple = case
    last = max(s.first_row + s.num_trained for group in groups for s in group)
    weights = torch.randn(last, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    weights = weights / last
    mine, theirs = model(seed, dtype), model(seed, torch.float64)
    found, loss = loss_of_pack(mine, pack(groups, share=share, multiple=multiple), weights)
    expected, plain = loss_apart(theirs, groups, weights.double())
    loss.backward()
    plain.backward()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name].grad.double(), weight.grad, rtol=0, atol=tolerance, msg=name)


@given(case=packs(), parts=st.integers(2, 4))
@settings(max_examples=12, deadline=None)
def test_each_part_of_a_pack_has_its_rows_of_the_whole(case: tuple, parts: int) -> None:
    """Values, and gradients that sum to the whole's over the parts."""
    groups, share, _ = case
    p = pack(groups, share=share, multiple=parts)
    bounds = bounds_of(p, parts, 1, Costs(pair=TOKEN // 50))
    q, k, v, grad = drawn(p, 0, torch.float64)
    whole, apart = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    dense(*whole, p, 0.3).backward(grad)
    for number in range(parts):
        mine = part(p, bounds, number)
        rows = slice(*mine.rows)
        out = attend(apart[0][rows], *apart[1:], mine, 0.3)
        torch.testing.assert_close(out, dense(*whole, p, 0.3)[rows], rtol=0, atol=1e-10)
        out.backward(grad[rows])
    for x, y in zip(apart, whole, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-10)


def test_old_torch_gets_the_limit_on_compiled_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes the limit since torch 2.12. Without it, the ninth pack's attention would be dense scores."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic, fullgraph: function)
    tree_attention._flex_attention.cache_clear()
    try:
        assert tree_attention._flex_attention() is flex_attention
        assert torch._dynamo.config.recompile_limit == MOST_GRAPHS
    finally:
        tree_attention._flex_attention.cache_clear()
