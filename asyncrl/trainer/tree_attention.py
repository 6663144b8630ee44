"""Attention over a pack without a mask of rows by rows: memory grows with the row, work with what is attended to.

On CPU, block by block (the kernels return log Z of the scores beside the values, so that parts of one softmax can be
computed apart): every branch on itself, causally, and all rows below a branch on the whole branch. Blocks of similar
size run as one call. Backward gives each block the values and log Z of the whole row, and sums (as ring attention does,
arXiv 2310.01889). On a GPU FlexAttention gets the same rule as a mask of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncrl.algo.pack import Branch, Pack

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

SPARE_PAIRS = 512
"""Pairs of row and key that a block may waste by running in one call with others: a call of its own costs as much."""


class Block(NamedTuple):
    """Rows that attend to keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


class Call:
    """Blocks of one kind, with rows of their own, as one padded batch; a single block as it stands."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.causal = blocks[0].causal
        self.alone = blocks[0] if len(blocks) == 1 else None
        if self.alone:
            return
        self.queries, self.rows, self.places, self.spare_queries = _padded([block.queries for block in blocks])
        self.keys, self.key_rows, self.key_places, self.spare_keys = _padded([block.keys for block in blocks])

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, 1, K] what is added to scores. (Causally no row sees what pads its block at the end.)"""
        if self.alone or self.causal or not self.spare_keys.any():
            return None
        return torch.zeros(self.spare_keys.shape, dtype=dtype).masked_fill(self.spare_keys, -math.inf)[:, None, None]

    def take_queries(self, x: Tensor) -> Tensor:
        """[N, h, d] -> [B, h, Q, d]."""
        return _slice(x, self.alone.queries) if self.alone else _gather(x, self.queries)

    def take_keys(self, x: Tensor) -> Tensor:
        """[N, h, d] -> [B, h, K, d]."""
        return _slice(x, self.alone.keys) if self.alone else _gather(x, self.keys)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write [B, h, Q, ...] to the rows of the queries of [N, h, ...]."""
        if self.alone:
            into[slice(*self.alone.queries)] = values[0].transpose(0, 1)
        else:
            into[self.rows] = _ungather(values, self.places).to(into.dtype)

    def add(self, into: Tensor, values: Tensor, *, keys: bool) -> None:
        """Add [B, h, Q or K, d] to their rows of [N, h, d]."""
        if self.alone:
            into[slice(*(self.alone.keys if keys else self.alone.queries))] += values[0].transpose(0, 1)
        elif keys:
            into.index_add_(0, self.key_rows, _ungather(values, self.key_places).to(into.dtype))
        else:
            into.index_add_(0, self.rows, _ungather(values, self.places).to(into.dtype))

    def merge(self, out: Tensor, log_z: Tensor, part: Tensor, part_z: Tensor) -> None:
        """Two parts of each row's softmax become one: out [N, h, d] and log_z [N, h] with part [B, h, Q, d]."""
        rows: Any = slice(*self.alone.queries) if self.alone else self.rows
        if self.alone:
            values, z = part[0].transpose(0, 1), part_z[0].transpose(0, 1)
        else:
            values, z = _ungather(part, self.places), _ungather(part_z, self.places)
        before = log_z[rows]
        both = torch.logaddexp(before, z)
        merged = out[rows] * (before - both).exp()[..., None]
        out[rows] = merged.addcmul_(values.to(out.dtype), (z - both).exp()[..., None])
        log_z[rows] = both


def _padded(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row indices [B, n] padded with 0; the rows in a line, their places in it, and which places pad."""
    begins, lengths = torch.tensor([a for a, _ in spans]), torch.tensor([b - a for a, b in spans])
    offsets = torch.arange(int(lengths.max()))
    spare = offsets >= lengths[:, None]
    index = (begins[:, None] + offsets).masked_fill(spare, 0)
    places = (~spare).flatten().nonzero().flatten()
    return index, index.flatten()[places], places, spare


def _slice(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x[slice(*span)].transpose(0, 1)[None]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.flatten()).unflatten(0, tuple(index.shape)).transpose(1, 2)


def _ungather(values: Tensor, places: Tensor) -> Tensor:
    return values.transpose(1, 2).flatten(0, 1).index_select(0, places)


@dataclass(frozen=True)
class Plan:
    """The calls of a pack: `own` cover every row once; each of `above` adds keys to rows that `own` has covered."""

    own: list[Call]
    above: list[Call]


def plan(branches: Sequence[Branch], rows: tuple[int, int]) -> Plan:
    """Blocks in calls, of the queries of these rows (no branch is on both sides of an end). Blocks of one depth have
    queries of their own."""
    first, last = rows

    def queries(begin: int, end: int) -> tuple[int, int]:
        return max(begin, first) - first, min(end, last) - first

    inside = [b for b in branches if first <= b.begin < last]
    own = [Block(queries(b.begin, b.end), (b.begin, b.end), True) for b in inside]
    deep = sorted((b for b in branches if max(b.end, first) < min(b.leave, last)), key=lambda b: b.depth)
    above = [
        call
        for _, level in groupby(deep, key=lambda b: b.depth)
        for call in _calls([Block(queries(b.end, b.leave), (b.begin, b.end), False) for b in level])
    ]
    return Plan(_calls(own), above)


def _calls(blocks: list[Block]) -> list[Call]:
    """Blocks in batches: as many calls fewer as the pairs that their padding adds allow."""
    batches: list[list[Block]] = []
    widest, longest, real = 0, 0, 0  # of the last batch: most keys, most queries, pairs that are no padding
    for block in sorted(blocks, key=lambda block: (_length(block.keys), _length(block.queries)), reverse=True):
        keys, queries = _length(block.keys), _length(block.queries)
        count = len(batches[-1]) + 1 if batches else 0
        padded = count * max(widest, keys) * max(longest, queries)
        if batches and padded - real - keys * queries <= count * SPARE_PAIRS:
            batches[-1].append(block)
            widest, longest, real = max(widest, keys), max(longest, queries), real + keys * queries
        else:
            batches.append([block])
            widest, longest, real = keys, queries, keys * queries
    return [Call(batch) for batch in batches]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


class _TreeAttention(torch.autograd.Function):
    """q [n, h, d], k and v [N, g, d] with g dividing h -> [n, h, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Plan, scale: float) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        several = bool(calls.above)
        out = torch.empty(q.shape, dtype=exact if several else q.dtype)
        log_z = torch.empty(q.shape[:2], dtype=exact)
        for call in calls.own:
            part, z = _forward(call.take_queries(q), call.take_keys(k), call.take_keys(v), is_causal=True, scale=scale)
            call.put(out, part)
            call.put(log_z, z)
        for call in calls.above:
            part, z = _forward(
                call.take_queries(q), call.take_keys(k), call.take_keys(v), attn_mask=call.mask(q.dtype), scale=scale
            )
            call.merge(out, log_z, part, z)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_z)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_z = ctx.saved_tensors
        grad = grads[0].contiguous()
        exact = torch.promote_types(q.dtype, torch.float32)
        sums = [torch.zeros(x.shape, dtype=exact) for x in (q, k, v)]
        for call in (*ctx.calls.own, *ctx.calls.above):
            mine, z = call.take_queries(grad), _rows_of(call, log_z)
            if not call.alone:  # what pads a block has no gradient, and a probability of 0 for every key
                mine = mine.masked_fill(call.spare_queries[:, None, :, None], 0.0)
                z = z.masked_fill(call.spare_queries[:, None], math.inf)
            parts = _backward(
                mine,
                call.take_queries(q),
                call.take_keys(k),
                call.take_keys(v),
                call.take_queries(out),
                z,
                0.0,
                call.causal,
                attn_mask=call.mask(q.dtype),
                scale=ctx.scale,
            )
            for total, part, keys in zip(sums, parts, (False, True, True), strict=True):
                call.add(total, part, keys=keys)
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None


def _rows_of(call: Call, log_z: Tensor) -> Tensor:
    """[N, h] -> [B, h, Q], laid out as the kernel left it."""
    return call.take_queries(log_z[..., None]).squeeze(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
    """q [n, h, d], k [N, g, d], v [N, g, e] -> [n, h, e]: each of this rank's n rows (all N, without context
    parallelism) over the rows that it attends to."""
    if q.device.type != "cpu":
        return _flex(q, k, v, pack, scale)
    width = v.shape[-1]
    if width != q.shape[-1]:  # latent attention's: the kernel takes one width
        widest = max(width, q.shape[-1])
        q, k, v = (torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if pack not in _PLANS:
        _PLANS[pack] = plan(pack.branches, pack.rows)
    out: Tensor = _TreeAttention.apply(q, k, v, _PLANS[pack], scale)
    return out[..., :width]


_PLANS: WeakKeyDictionary[Pack, Plan] = WeakKeyDictionary()  # one for all layers, and for both passes


# --- on a GPU -----------------------------------------------------------------------------------------------


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(pack: Pack) -> Any:
    """The rule of `pack.ends` for FlexAttention, which keeps it by blocks of 128 rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends, (first, last) = pack.ends, pack.rows

    def attends(_: Tensor, __: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + first) & (row + first < ends[key])

    return create_block_mask(attends, None, None, last - first, len(ends), device=str(ends.device))


_MASKS: WeakKeyDictionary[Pack, Any] = WeakKeyDictionary()


def _flex(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
    if pack not in _MASKS:
        _MASKS[pack] = block_mask(pack)
    batched = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = _flex_attention()(*batched, block_mask=_MASKS[pack], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
