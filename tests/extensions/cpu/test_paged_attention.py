"""The engine's padded attention equals attention written out, request by request and head by head."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.extensions.cpu.paged_attention import attend, make_plan

REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6)  # (cached, new) tokens
HEADS = st.sampled_from([(4, 4), (6, 2), (3, 1)])


SPECIAL = st.tuples(st.sampled_from([None, 0, 1, 4, 20]), st.booleans())
"""The window, and whether there are sinks."""


@given(REQUESTS, HEADS, SPECIAL, st.integers(0, 2**16))
def test_every_new_token_sees_its_own_request_up_to_itself(
    requests: list[tuple[int, int]], heads: tuple[int, int], special: tuple[int | None, bool], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths, new = [cached + count for cached, count in requests], [count for _, count in requests]
    slots = torch.zeros(len(requests), max(lengths), dtype=torch.int64)
    order = torch.randperm(sum(lengths), generator=draw) + 1  # pages lie anywhere in the cache; 0 is its padding
    for request, chunk in enumerate(order.split(lengths)):
        slots[request, : len(chunk)] = chunk
    check(slots, lengths, new, heads, draw, *special)


GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1, max_size=4
)  # for each group: slots that its requests share, and how many each has of its own


@given(GROUPS, HEADS, st.integers(0, 3), SPECIAL, st.integers(0, 2**16))
def test_siblings_sharing_cache_attend_as_if_alone(
    groups: list[tuple[int, list[int]]],
    heads: tuple[int, int],
    system: int,
    special: tuple[int | None, bool],
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = system + sum(common + sum(owns) for common, owns in groups)
    free = iter((torch.randperm(count, generator=draw) + 1).tolist())
    take = lambda number: [next(free) for _ in range(number)]  # noqa: E731
    first, rows = take(system), list[list[int]]()
    for common, owns in groups:
        prompt = first + take(common)
        rows += [prompt + take(own) for own in owns]
    lengths = [len(row) for row in rows]
    slots = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for row, filled in zip(slots, rows, strict=True):
        row[: len(filled)] = torch.tensor(filled)
    check(slots, lengths, [1] * len(rows), heads, draw, *special)


def test_siblings_read_their_prompt_once() -> None:
    slots = torch.cat([torch.arange(1, 21).repeat(6, 1), torch.arange(21, 27)[:, None]], 1)
    slots[3:, :20] += 100  # two groups of three
    plan = make_plan(slots, [21] * 6, [1] * 6)
    assert plan.shared.shape == (2, 20)
    assert plan.own.shape == (6, 1)


def test_run_shares_no_more_than_all_of_its_requests_do() -> None:
    """Neighbours agree in 20 slots and then in 17: the third must not read the first one's 18th to 20th."""
    draw = torch.Generator().manual_seed(0)
    slots = torch.arange(1, 22).repeat(3, 1)
    slots[1, 20:], slots[2, 17:] = 30, torch.arange(31, 35)
    assert make_plan(slots, [21] * 3, [1] * 3).shared.shape == (1, 17)
    check(slots, [21] * 3, [1] * 3, (6, 2), draw)


def test_window_layers_read_their_cache_and_their_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps other entries of such layers, and translates the entries of the others."""
    parents = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention")
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    metadata: Any = {"init_forward_metadata": lambda *_: None, "forward_decode": lambda self, call, **_: call()}
    fake: Any = ModuleType(f"{parents[-1]}.torch_native_backend")
    fake.TorchNativeAttnBackend = type("TorchNativeAttnBackend", (), metadata)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delitem(sys.modules, "asyncrl.extensions.cpu.sglang_attention", raising=False)
    backend = importlib.import_module("asyncrl.extensions.cpu.sglang_attention").BatchedAttention()

    draw = torch.Generator().manual_seed(0)
    slots, moved = torch.arange(1, 9, dtype=torch.int32)[None], torch.randperm(9, generator=draw)
    k_cache, v_cache = (torch.randn(9, 2, 8, generator=draw) for _ in range(2))
    query, sinks = torch.randn(1, 4, 8, generator=draw), torch.randn(4, generator=draw)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    backend.token_to_kv_pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda of: moved[of])
    backend.use_sliding_window_kv_pool = True
    mode, lengths = SimpleNamespace(is_decode_or_idle=lambda: True), torch.tensor([8])
    backend.init_forward_metadata(
        SimpleNamespace(seq_lens=lengths, forward_mode=mode, req_pool_indices=torch.tensor([0]))
    )
    for window, read, of_layer in ((None, slots, None), (3, moved[slots.long()], sinks), (None, slots, None)):
        tensors = (query, torch.empty_like(query), k_cache, v_cache)
        named = {"is_cross_attn": False, "sliding_window_size": window, "scaling": 0.3}
        found = backend.forward_decode(partial(backend._run_sdpa_forward_decode, *tensors, **named), sinks=of_layer)
        plan = make_plan(read, [8], [1], window)
        assert found.equal(attend(plan, query, torch.empty_like(query), k_cache, v_cache, 0.3, of_layer))


def check(
    slots: Tensor,
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int],
    draw: torch.Generator,
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    """Compare with attention written out."""
    query_heads, kv_heads = heads
    cache_size, width = int(slots.max()) + 1, 8
    k_cache, v_cache = (torch.randn(cache_size, kv_heads, width, generator=draw, dtype=torch.float64) for _ in range(2))
    query = torch.randn(sum(new), query_heads, width, generator=draw, dtype=torch.float64)
    sinks = torch.randn(query_heads, generator=draw, dtype=torch.float64) if with_sinks else None
    plan, out = make_plan(slots, lengths, new, window), torch.full_like(query, torch.nan)
    found = attend(plan, query, out, k_cache, v_cache, 0.3, sinks)

    row = 0
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for position in range(length - count, length):
            first = 0 if window is None else max(0, position - window)
            visible = slots[request, first : position + 1]
            for head in range(query_heads):
                shared = head // (query_heads // kv_heads)
                scores = 0.3 * k_cache[visible, shared] @ query[row, head]
                of_sink = scores.new_empty(0) if sinks is None else sinks[head][None]
                weights = torch.cat([scores, of_sink]).softmax(0)[: len(scores)]
                torch.testing.assert_close(found[row, head], weights @ v_cache[visible, shared])
            row += 1
