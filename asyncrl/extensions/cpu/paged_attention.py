"""Attention of many short requests over a paged key-value cache as a few padded matrix products, in pure torch.

A request with one new token (decoding, or a sibling whose prompt is cached) is a row of these products. Neighbouring
requests that begin with the same cache entries, as the siblings of a group do, read those entries only once (cascade
attention: Ye et al., FlashInfer, arXiv 2501.01005, section 3.1.2). Query heads that share a key-value head are rows of
one product, so no key is repeated. Requests with several new tokens are computed one by one.

On a CPU, attention is memory-bound: for 64 requests of 200 tokens in groups of 8, this code reads a seventh of the
memory that attention per request would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ALIKE = 0.75
"""Neighbours form a run when they share at least this fraction of their cache entries."""


@dataclass
class PagedAttentionPlan:
    """Attention plan of one forward pass, made once and used by every layer. C is the KV cache's size."""

    rows: Tensor  # [S] query rows of the requests with one new token
    members: Tensor  # [R, M] requests of each run of neighbours, padded with its first one
    place: Tensor  # [S] index of each request in the flattened `members`
    shared: Tensor  # [R, P] cache slots that a run shares, padded with 0
    own: Tensor  # [S, O] the other slots of each request, padded with 0
    hidden: Tensor  # [S, 1, 1, P + O] bool: padding, and what is outside the window
    longer: list[tuple[int, int, Tensor, Tensor]]  # other requests: (first row, end, slots [K], visible [new, K])


def make_plan(slots: Tensor, lengths: list[int], new: list[int], window: int | None = None) -> PagedAttentionPlan:
    """Plan the attention of one forward pass.

    `slots` [requests, longest] are the cache slots of each request's tokens. The last `new` of its `lengths` tokens are
    queries, which attend to all tokens before them, or to the last `window` of these.
    """
    single: list[int] = []
    rows: list[int] = []
    longer = []
    row = 0
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if count == 1:
            single.append(request)
            rows.append(row)
        else:
            visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            if window is not None:
                visible = visible.triu(length - count - window)
            longer.append((row, row + count, slots[request, :length].long(), visible))
        row += count
    return PagedAttentionPlan(
        torch.tensor(rows, dtype=torch.int64), *_plan_runs(slots, lengths, single, window), longer
    )


def _plan_runs(
    slots: Tensor, lengths: list[int], single: list[int], window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return `members`, `place`, `shared`, `own` and `hidden` of a PagedAttentionPlan."""
    length_of = torch.tensor([lengths[request] for request in single], dtype=torch.int64)
    longest = int(length_of.max()) if single else 0
    slots = slots[torch.tensor(single, dtype=torch.int64), :longest].long()
    runs, common = _runs(slots, length_of)

    members = torch.tensor([run + run[:1] * (max(map(len, runs)) - len(run)) for run in runs], dtype=torch.int64)
    place, shared_of = torch.empty(len(single), dtype=torch.int64), torch.empty(len(single), dtype=torch.int64)
    for number, run in enumerate(runs):
        place[run] = torch.arange(len(run)) + number * members.shape[1]
        shared_of[run] = common[number]
    most = max(common, default=0)
    column, first = torch.arange(most), members[:, 0] if runs else members
    shared = slots[first, :most] * (column < torch.tensor(common)[:, None]) if runs else slots
    rest = length_of - shared_of
    at = torch.arange(int(rest.max()) if single else 0)
    own = slots.gather(1, (shared_of[:, None] + at).clamp(max=max(0, longest - 1))) * (at < rest[:, None])
    hidden = torch.cat([column >= shared_of[:, None], at >= rest[:, None]], 1)
    if window is not None:
        positions = torch.cat([column.expand(len(single), -1), shared_of[:, None] + at], 1)
        hidden |= positions < length_of[:, None] - 1 - window
    return members, place, shared, own, hidden[:, None, None]


def _runs(slots: Tensor, lengths: Tensor) -> tuple[list[list[int]], list[int]]:
    """Return the runs of neighbours with a common prefix, and the number of slots that each run shares.

    A run of one request shares none.
    """
    both = torch.minimum(lengths[1:], lengths[:-1])
    equal = (slots[1:] == slots[:-1]) & (torch.arange(slots.shape[1]) < both[:, None])
    agreeing = equal.long().cumprod(1).sum(1)
    joined = (agreeing >= ALIKE * torch.maximum(lengths[1:], lengths[:-1])).tolist()
    runs: list[list[int]] = []
    common: list[int] = []
    for request in range(len(lengths)):
        if request and joined[request - 1]:
            agree = int(agreeing[request - 1])
            common[-1] = min(common[-1], agree) if len(runs[-1]) > 1 else agree
            runs[-1].append(request)
        else:
            runs.append([request])
            common.append(0)
    return runs, common


def attend(
    plan: PagedAttentionPlan,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Fill and return `output`. Shapes: query and output [T, heads, d], caches [C, kv heads, d]; `sinks` [heads] are
    scores of a key without a value."""
    kv_heads = k_cache.shape[1]
    of_sinks = None if sinks is None else sinks.to(query.dtype).view(kv_heads, -1)
    if len(plan.rows):
        q = query[plan.rows].unflatten(1, (kv_heads, -1))  # [S, kv, heads per kv, d]
        output[plan.rows] = _attend_runs(plan, q * scale, k_cache, v_cache, of_sinks).flatten(1, 2).to(output.dtype)
    for first, end, slots, visible in plan.longer:
        q = query[first:end].unflatten(1, (kv_heads, -1))  # [new, kv, heads per kv, d]
        count, per_kv = q.shape[0], q.shape[2]
        q = q.permute(1, 2, 0, 3).flatten(1, 2)[None]  # [1, kv, heads per kv * new, d]
        k, v = (cache[slots].transpose(0, 1)[None].to(q.dtype) for cache in (k_cache, v_cache))
        mask = visible.repeat(per_kv, 1)
        if of_sinks is not None:  # a key of zeros, whose scores are those of the sinks
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
            last = of_sinks.repeat_interleave(count, 1)[..., None]  # [kv, heads per kv * new, 1]
            mask = torch.cat([mask.expand(kv_heads, -1, -1), last], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0]
        output[first:end] = out.unflatten(1, (per_kv, count)).permute(2, 0, 1, 3).flatten(1, 2)
    return output


def _attend_runs(plan: PagedAttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None) -> Tensor:
    """Attend from scaled queries [S, kv, h, d] to the shared and the own keys under one softmax -> [S, kv, h, d]."""
    shared_k, shared_v, own_k, own_v = (
        cache[slots].transpose(1, 2).to(q.dtype) for slots in (plan.shared, plan.own) for cache in (k_cache, v_cache)
    )  # [R, kv, P, d] twice, [S, kv, O, d] twice
    scores = torch.cat([_by_request(plan, _by_run(plan, q) @ shared_k.mT, q), q @ own_k.mT], -1)
    scores = scores.masked_fill_(plan.hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None].expand(len(scores), -1, -1, -1)], -1)
    weights = scores.softmax(-1)
    of_shared, of_own, _ = weights.split([shared_k.shape[2], own_k.shape[2], int(sinks is not None)], -1)
    return _by_request(plan, _by_run(plan, of_shared) @ shared_v, q) + of_own @ own_v


def _by_run(plan: PagedAttentionPlan, values: Tensor) -> Tensor:
    """Gather per-request values into runs: [S, kv, h, n] -> [R, kv, M * h, n]."""
    return values[plan.members].transpose(1, 2).flatten(2, 3)


def _by_request(plan: PagedAttentionPlan, values: Tensor, q: Tensor) -> Tensor:
    """Scatter per-run values back to requests: [R, kv, M * h, n] -> [S, kv, h, n], with h from `q` [S, kv, h, d]."""
    return values.unflatten(2, (-1, q.shape[2])).transpose(1, 2).flatten(0, 1)[plan.place]
