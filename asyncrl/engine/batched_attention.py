"""Attention of many short requests over a paged key-value cache, as one padded call. Pure torch.

Every request with one new token (decoding, and siblings behind a shared prompt) is a row of the call; query heads that
share a key-value head stand as its queries, so nothing is repeated. Longer prefills go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Plan:
    """How the requests of one forward pass attend; made once, used by every layer. C is the KV cache's size."""

    rows: Tensor  # [S] query rows of the requests with one new token
    slots: Tensor  # [S, L] their tokens' places in the cache, padded with 0
    seen: Tensor  # [S, 1, 1, L] bool
    longer: list[tuple[int, int, Tensor, Tensor]]  # (first row, end, places [K], seen [new, K]) of the others


def make_plan(places: Tensor, lengths: list[int], new: list[int]) -> Plan:
    """places [requests, longest]: where each request's tokens lie in the cache; `new` of its `lengths` are queries."""
    single: list[int] = []
    rows: list[int] = []
    longer = []
    row = 0
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if count == 1:
            single.append(request)
            rows.append(row)
        else:
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            longer.append((row, row + count, places[request, :length].long(), seen))
        row += count
    chosen = torch.tensor(single, dtype=torch.int64)
    lengths_of = torch.tensor([lengths[request] for request in single], dtype=torch.int64)
    longest = int(lengths_of.max()) if single else 0
    seen = torch.arange(longest) < lengths_of[:, None]
    slots = places[chosen, :longest].long() * seen  # place 0 is the cache's padding: finite, and not seen
    return Plan(torch.tensor(rows, dtype=torch.int64), slots, seen[:, None, None], longer)


def attend(plan: Plan, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """query and output [T, heads, d], caches [C, kv heads, d] -> output, filled."""
    kv_heads = k_cache.shape[1]
    if len(plan.rows):
        q = query[plan.rows].unflatten(1, (kv_heads, -1))  # [S, kv, heads per kv, d]
        k, v = (cache[plan.slots].transpose(1, 2).to(q.dtype) for cache in (k_cache, v_cache))  # [S, kv, L, d]
        output[plan.rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.seen, scale=scale).flatten(1, 2)
    for first, end, places, seen in plan.longer:
        q = query[first:end].unflatten(1, (kv_heads, -1))  # [new, kv, heads per kv, d]
        count, shared = q.shape[0], q.shape[2]
        q = q.permute(1, 2, 0, 3).flatten(1, 2)[None]  # [1, kv, heads per kv * new, d]
        k, v = (cache[places].transpose(0, 1)[None].to(q.dtype) for cache in (k_cache, v_cache))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.repeat(shared, 1), scale=scale)[0]
        output[first:end] = out.unflatten(1, (shared, count)).permute(2, 0, 1, 3).flatten(1, 2)
    return output
