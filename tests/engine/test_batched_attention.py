"""The engine's padded attention equals attention written out, request by request and head by head."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.batched_attention import attend, make_plan

REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6)  # (cached, new) tokens


@given(REQUESTS, st.sampled_from([(4, 4), (6, 2), (3, 1)]), st.integers(0, 2**16))
def test_every_new_token_sees_its_own_request_up_to_itself(
    requests: list[tuple[int, int]], heads: tuple[int, int], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    lengths, new = [cached + count for cached, count in requests], [count for _, count in requests]
    cache_size, width = sum(lengths) + 1, 8
    places = torch.zeros(len(requests), max(lengths), dtype=torch.int64)
    order = torch.randperm(cache_size - 1, generator=draw) + 1  # pages lie anywhere in the cache; 0 is its padding
    for request, chunk in enumerate(order.split(lengths)):
        places[request, : len(chunk)] = chunk
    k_cache, v_cache = (torch.randn(cache_size, kv_heads, width, generator=draw, dtype=torch.float64) for _ in range(2))
    query = torch.randn(sum(new), query_heads, width, generator=draw, dtype=torch.float64)
    found = attend(make_plan(places, lengths, new), query, torch.full_like(query, torch.nan), k_cache, v_cache, 0.3)

    row = 0
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for position in range(length - count, length):
            seen = places[request, : position + 1]
            for head in range(query_heads):
                shared = head // (query_heads // kv_heads)
                weights = torch.softmax(0.3 * k_cache[seen, shared] @ query[row, head], 0)
                torch.testing.assert_close(found[row, head], weights @ v_cache[seen, shared])
            row += 1
