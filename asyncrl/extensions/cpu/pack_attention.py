"""Attention of the trainer over a pack on CPU: block by block, with similar blocks batched into one kernel call.

The kernels return log Z of the scores with the values, so that parts of one softmax can be computed separately.
Backward gives each block the values and log Z of the whole row and sums the gradients (like ring attention, arXiv
2310.01889).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncrl.algo.context_parallel_split import cut
from asyncrl.algo.pack import Branch, Pack

SPARE_PAIRS = 512
"""(Row, key) pairs that a block may waste on padding when it is batched with others: a separate call costs as much."""
ALONE = 96
"""Limit on a block's queries plus keys. A larger block runs alone, because copying its rows together with others costs
more."""
SPARE_PAIRS_OF_BLOCKS = 128
"""(Row, key) pairs that merging small blocks into one masked block may waste for each block saved."""

CAUSAL, ALL, TREE, WINDOW = "causal", "all", "tree", "window"
MASKED = (TREE, WINDOW)


def _forward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the values, and log Z of the scores."""
    return _in_a_format_of_torch(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, tensors, options)


def _backward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return _in_a_format_of_torch(kernel, arguments, options)


def _in_a_format_of_torch(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call a kernel, in float32 where torch has none for bfloat16. The results have the format of the first tensor, but
    for log Z, which is in float32 anyway."""
    dtype = arguments[0].dtype
    if dtype != torch.bfloat16 or not _lacks_bfloat16():
        return kernel(*arguments, **options)
    wide = [_wide(one) for one in arguments]
    first, *others = kernel(*wide, **{name: _wide(one) for name, one in options.items()})
    return (first.to(dtype), *(one if one.dim() < first.dim() else one.to(dtype) for one in others))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def attend(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attend as trainer/tree_attention.py does: q [n, h, d], k [N, g, d], v [N, g, e] -> [n, h, e]."""
    width = v.shape[-1]
    if width != q.shape[-1]:  # latent attention: the kernel supports a single width
        widest = max(width, q.shape[-1])
        q, k, v = (torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    plans = _PLANS.setdefault(pack, {})
    if window not in plans:
        plans[window] = plan(pack, window)
    out: Tensor = _TreeAttention.apply(q, k, v, sinks, plans[window], scale)
    return out[..., :width]


@cache
def _lacks_bfloat16() -> bool:
    """Return whether ATEN_CPU_CAPABILITY hides AVX-512 from torch. Its attention lays bfloat16 out by what the CPU has,
    and then raises because it may not use it."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class _TreeAttention(torch.autograd.Function):
    """Attention on CPU: q [n, h, d], k and v [N, g, d] with g dividing h -> [n, h, d]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: AttentionPlan, scale: float
    ) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        several = bool(calls.above) or sinks is not None
        out = torch.empty(q.shape, dtype=exact if several else q.dtype)
        log_z = torch.empty(q.shape[:2], dtype=exact)
        for call in calls.own:
            part, z = _forward(
                call.take_queries(q),
                call.take_keys(k),
                call.take_keys(v),
                is_causal=call.causal,
                attn_mask=call.mask(q.dtype),
                scale=scale,
            )
            call.put(out, part)
            call.put(log_z, z)
        for call in calls.above:
            part, z = _forward(
                call.take_queries(q), call.take_keys(k), call.take_keys(v), attn_mask=call.mask(q.dtype), scale=scale
            )
            call.merge(out, log_z, part, z)
        if sinks is not None:
            both = torch.logaddexp(log_z, sinks.to(exact))
            out.mul_((log_z - both).exp()[..., None])
            log_z = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, log_z)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_z = ctx.saved_tensors
        grad = grads[0].contiguous()
        exact = torch.promote_types(q.dtype, torch.float32)
        of_sinks = None
        if sinks is not None:
            shares = (sinks.to(exact) - log_z).exp()
            of_sinks = -(shares * (grad.to(exact) * out.to(exact)).sum(-1)).sum(0).to(sinks.dtype)
        whole = len(q) == len(k)  # then every key is covered by `own` calls, which come first
        sums = [torch.empty(q.shape, dtype=exact)]
        sums += [(torch.empty if whole else torch.zeros)(x.shape, dtype=exact) for x in (k, v)]
        for number, call in enumerate((*ctx.calls.own, *ctx.calls.above)):
            mine, z = call.take_queries(grad), _rows_of(call, log_z)
            if not call.alone:  # padding has no gradient, and probability 0 for every key
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
            first = number < len(ctx.calls.own)
            for total, part, keys in zip(sums, parts, (False, True, True), strict=True):
                (call.put if first else call.add)(total, part, keys=keys)
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), of_sinks, None, None


def _rows_of(call: AttentionCall, log_z: Tensor) -> Tensor:
    """Select the block rows of [N, h] -> [B, h, Q], laid out as the kernel left them."""
    return call.take_queries(log_z[..., None]).squeeze(-1)


# --- the calls -----------------------------------------------------------------------------------------------


class AttentionBlock(NamedTuple):
    """Rows of this rank that attend to keys: causally, to all of them, or as the prefix tree says."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: str


Hides = Callable[[Tensor, Tensor], Tensor]
"""Returns whether a row, numbered on this rank, does not attend to a key, numbered in the pack."""


class AttentionCall:
    """Blocks of one kind with disjoint rows, as one padded batch. A single block stays as it is."""

    def __init__(self, blocks: Sequence[AttentionBlock], hides: Hides) -> None:
        self.causal = blocks[0].kind == CAUSAL
        self.alone = blocks[0] if len(blocks) == 1 else None
        self._masks: dict[torch.dtype, Tensor] = {}
        if self.alone and self.alone.kind not in MASKED:
            return
        self._queries, self.rows, self._places, self.spare_queries = _padded([block.queries for block in blocks])
        self._keys, self._key_rows, self._key_places, spare_keys = _padded([block.keys for block in blocks])
        if blocks[0].kind in MASKED:
            hidden = hides(self._queries[:, :, None], self._keys[:, None, :]) | spare_keys[:, None, :]
            hidden[:, :, 0] &= ~self.spare_queries  # a row without any key would become NaN
            self._hidden: Tensor | None = hidden[:, None]
        else:  # causal: no row attends to the padding, which is at the end of its block
            padded = not self.causal and bool(spare_keys.any())
            self._hidden = spare_keys[:, None, None] if padded else None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor to add to the scores, [B, 1, Q or 1, K], or None."""
        if (self.alone and self.alone.kind not in MASKED) or self._hidden is None:
            return None
        if dtype not in self._masks:
            self._masks[dtype] = torch.zeros(self._hidden.shape, dtype=dtype).masked_fill(self._hidden, -math.inf)
        return self._masks[dtype]

    def take_queries(self, x: Tensor) -> Tensor:
        """Select the queries: [n, h, d] -> [B, h, Q, d]."""
        return _slice(x, self.alone.queries) if self.alone else _gather(x, self._queries)

    def take_keys(self, x: Tensor) -> Tensor:
        """Select the keys or values: [N, h, d] -> [B, h, K, d]."""
        return _slice(x, self.alone.keys) if self.alone else _gather(x, self._keys)

    def put(self, into: Tensor, values: Tensor, *, keys: bool = False) -> None:
        """Write [B, h, Q or K, ...] to its rows of [n or N, h, ...]."""
        if self.alone:
            into[slice(*(self.alone.keys if keys else self.alone.queries))] = values[0].transpose(0, 1)
            return
        rows, places = (self._key_rows, self._key_places) if keys else (self.rows, self._places)
        into.index_copy_(0, rows, _ungather(values, places).to(into.dtype))

    def add(self, into: Tensor, values: Tensor, *, keys: bool) -> None:
        """Add [B, h, Q or K, d] to its rows of [n or N, h, d]."""
        if self.alone:
            into[slice(*(self.alone.keys if keys else self.alone.queries))] += values[0].transpose(0, 1)
            return
        rows, places = (self._key_rows, self._key_places) if keys else (self.rows, self._places)
        into.index_add_(0, rows, _ungather(values, places).to(into.dtype))

    def merge(self, out: Tensor, log_z: Tensor, part: Tensor, part_z: Tensor) -> None:
        """Merge a partial softmax (`part` [B, h, Q, d] and `part_z`) into the rows of `out` [n, h, d] and `log_z` [n,
        h]."""
        if self.alone:
            rows = slice(*self.alone.queries)
            before, z, values = log_z[rows], part_z[0].transpose(0, 1), part[0].transpose(0, 1)
            both = torch.logaddexp(before, z)
            out[rows].mul_((before - both).exp()[..., None]).addcmul_(values.to(out.dtype), (z - both).exp()[..., None])
            log_z[rows] = both
            return
        before, z = log_z.index_select(0, self.rows), _ungather(part_z, self._places)
        both = torch.logaddexp(before, z)
        merged = out.index_select(0, self.rows).mul_((before - both).exp()[..., None])
        merged.addcmul_(_ungather(part, self._places).to(out.dtype), (z - both).exp()[..., None])
        out.index_copy_(0, self.rows, merged)
        log_z.index_copy_(0, self.rows, both)


def _padded(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the row indices [B, n] padded with 0, the real rows flattened, their positions in the flattened indices,
    and a mask of the padding."""
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


# --- planning the blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of a pack: `own` covers every row once; each call of `above` adds further keys to rows that `own` has
    covered."""

    own: list[AttentionCall]
    above: list[AttentionCall]


def plan(pack: Pack, window: int | None = None) -> AttentionPlan:
    """Plan the calls of a pack: every branch attends to itself, and all rows below a branch attend to the whole branch.
    Consecutive small branches become one block. Under context parallelism the plan covers the queries of this rank's
    rows; no branch crosses their bounds."""
    first = pack.rows[0]

    def hides(row: Tensor, key: Tensor) -> Tensor:
        row = row + first
        hidden = (key > row) | (row >= pack.ends[key])
        return hidden if window is None else hidden | (pack.positions[row] - pack.positions[key] >= window)

    own, above = _blocks(pack.branches, pack.rows) if window is None else _windowed(pack, window)
    kinds = [[block for block in own if block.kind == kind] for kind in (CAUSAL, TREE)]
    levels = [[block for _, block in level] for _, level in groupby(sorted(above), key=lambda entry: entry[0])]
    return AttentionPlan(
        [call for blocks in kinds for call in _calls(blocks, hides)],
        [call for blocks in levels for call in _calls(blocks, hides)],  # blocks of one depth have disjoint rows
    )


def _windowed(pack: Pack, window: int) -> tuple[list[AttentionBlock], list[tuple[int, AttentionBlock]]]:
    """Return the blocks of a window, as `_blocks` does. Branches are cut to its width, so that a piece attends to all
    of itself, and its first rows to the last keys of each piece above it that is near."""
    first, last = pack.rows
    bounds = [row for one in pack.branches for row in range(one.begin, one.end, window)]
    own: list[AttentionBlock] = []
    above: list[tuple[int, AttentionBlock]] = []
    path: list[Branch] = []
    for piece in cut(pack.branches, bounds):
        del path[piece.depth :]
        begin, end = piece.begin - first, piece.end - first
        if first <= piece.begin < last:
            own.append(AttentionBlock((begin, end), (piece.begin, piece.end), CAUSAL))
            seen = window - 1  # keys before the piece that its first row sees
            for upper in reversed(path):
                if seen <= 0:
                    break
                keys = (max(upper.begin, upper.end - seen), upper.end)
                above.append((upper.depth, AttentionBlock((begin, min(end, begin + seen)), keys, WINDOW)))
                seen -= upper.end - upper.begin
        path.append(piece)
    return own, above


def _blocks(
    branches: Sequence[Branch], rows: tuple[int, int]
) -> tuple[list[AttentionBlock], list[tuple[int, AttentionBlock]]]:
    """Return the blocks of rows that attend to themselves, and (depth, block) of those that attend to a branch above
    them."""
    first, last = rows
    begins = [branch.begin for branch in branches]
    own: list[AttentionBlock] = []
    above: list[tuple[int, AttentionBlock]] = []

    def queries(begin: int, end: int) -> tuple[int, int]:
        return max(begin, first) - first, min(end, last) - first

    def together(start: int, stop: int) -> bool:
        """Add one block for these consecutive branches and return True if that is cheaper; otherwise return False."""
        span = (branches[start].begin, branches[stop - 1].end) if stop - start > 1 else (0, 0)
        if not span[1] or span[0] < first or span[1] > last or not _small(branches[start:stop]):
            return False
        own.append(AttentionBlock(queries(*span), span, TREE))
        return True

    number = 0
    while number < len(branches):
        branch, after = branches[number], bisect_left(begins, branches[number].leave)
        if together(number, after):
            number = after
            continue
        if first <= branch.begin < last:
            own.append(AttentionBlock(queries(branch.begin, branch.end), (branch.begin, branch.end), CAUSAL))
        if max(branch.end, first) < min(branch.leave, last):
            block = AttentionBlock(queries(branch.end, branch.leave), (branch.begin, branch.end), ALL)
            above.append((branch.depth, block))
        number = after if together(number + 1, after) else number + 1
    return own, above


def _small(branches: Sequence[Branch]) -> bool:
    """Return whether one block of all pairs costs less than one block per branch plus one for the rows below each
    branch."""
    rows = branches[-1].end - branches[0].begin
    if rows * rows > 2 * len(branches) * (SPARE_PAIRS_OF_BLOCKS + rows):  # a quick bound before examining every branch
        return False
    blocks = len(branches) + sum(b.leave > b.end for b in branches)
    pairs = sum((b.end - b.begin) * (b.leave - b.begin) for b in branches)
    return rows * rows - pairs <= (blocks - 1) * SPARE_PAIRS_OF_BLOCKS


def _calls(blocks: list[AttentionBlock], hides: Hides) -> list[AttentionCall]:
    """Batch blocks into calls: a block joins a batch as long as the padding costs less than the call it saves."""
    batches: list[list[AttentionBlock]] = []
    widest, longest, real = 0, 0, 0  # of the last batch: most keys, most queries, pairs that are not padding
    for block in sorted(blocks, key=lambda block: (_length(block.keys), _length(block.queries)), reverse=True):
        keys, queries = _length(block.keys), _length(block.queries)
        count = len(batches[-1]) + 1 if batches else 0
        padded = count * max(widest, keys) * max(longest, queries)
        if batches and keys + queries <= ALONE and padded - real - keys * queries <= count * SPARE_PAIRS:
            batches[-1].append(block)
            widest, longest, real = max(widest, keys), max(longest, queries), real + keys * queries
        else:
            batches.append([block])
            widest, longest, real = keys, queries, keys * queries
    return [AttentionCall(batch, hides) for batch in batches]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


_PLANS: WeakKeyDictionary[Pack, dict[int | None, AttentionPlan]] = WeakKeyDictionary()
"""By the window of a layer; shared by all layers and both passes."""
