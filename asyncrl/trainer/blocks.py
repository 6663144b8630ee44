"""How the attention of a pack is done on CPU: in blocks of rows and keys, of which similar ones run as one call."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.algo.pack import Branch, Pack

SPARE_PAIRS = 512
"""Pairs of row and key that a block may waste by running in one call with others: a call of its own costs as much."""
ALONE = 96
"""A block with more queries and keys runs alone: its rows would have to be copied together, which costs more."""
SPARE_PAIRS_OF_BLOCKS = 128
"""The same for a block within a call: small ones become one with a mask."""

CAUSAL, ALL, TREE = "causal", "all", "tree"


class Block(NamedTuple):
    """Rows (of this rank) that attend to keys: causally, to all of them, or as the tree says."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: str


class Call:
    """Blocks of one kind, with rows of their own, as one padded batch; a single block as it stands."""

    def __init__(self, blocks: Sequence[Block], ends: Tensor) -> None:
        self.causal = blocks[0].kind == CAUSAL
        self.alone = blocks[0] if len(blocks) == 1 else None
        self._masks: dict[torch.dtype, Tensor] = {}
        if self.alone and self.alone.kind != TREE:
            return
        self._queries, self.rows, self._places, self.spare_queries = _padded([block.queries for block in blocks])
        self._keys, self._key_rows, self._key_places, spare_keys = _padded([block.keys for block in blocks])
        if blocks[0].kind == TREE:
            row, key = self._keys[:, :, None], self._keys[:, None, :]
            hidden = (key > row) | (row >= ends[key]) | spare_keys[:, None, :]
            hidden[:, :, 0] &= ~self.spare_queries  # a row without any key would be NaN
            self._hidden: Tensor | None = hidden[:, None]
        else:  # causally no row sees what pads its block at the end
            padded = not self.causal and bool(spare_keys.any())
            self._hidden = spare_keys[:, None, None] if padded else None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, Q or 1, K] what is added to scores."""
        if (self.alone and self.alone.kind != TREE) or self._hidden is None:
            return None
        if dtype not in self._masks:
            self._masks[dtype] = torch.zeros(self._hidden.shape, dtype=dtype).masked_fill(self._hidden, -math.inf)
        return self._masks[dtype]

    def take_queries(self, x: Tensor) -> Tensor:
        """[n, h, d] -> [B, h, Q, d]."""
        return _slice(x, self.alone.queries) if self.alone else _gather(x, self._queries)

    def take_keys(self, x: Tensor) -> Tensor:
        """[N, h, d] -> [B, h, K, d]."""
        return _slice(x, self.alone.keys) if self.alone else _gather(x, self._keys)

    def put(self, into: Tensor, values: Tensor, *, keys: bool = False) -> None:
        """Write [B, h, Q or K, ...] to their rows of [n or N, h, ...]."""
        if self.alone:
            into[slice(*(self.alone.keys if keys else self.alone.queries))] = values[0].transpose(0, 1)
            return
        rows, places = (self._key_rows, self._key_places) if keys else (self.rows, self._places)
        into.index_copy_(0, rows, _ungather(values, places).to(into.dtype))

    def add(self, into: Tensor, values: Tensor, *, keys: bool) -> None:
        """Add [B, h, Q or K, d] to their rows of [n or N, h, d]."""
        if self.alone:
            into[slice(*(self.alone.keys if keys else self.alone.queries))] += values[0].transpose(0, 1)
            return
        rows, places = (self._key_rows, self._key_places) if keys else (self.rows, self._places)
        into.index_add_(0, rows, _ungather(values, places).to(into.dtype))

    def merge(self, out: Tensor, log_z: Tensor, part: Tensor, part_z: Tensor) -> None:
        """Two parts of each row's softmax become one: out [n, h, d] and log_z [n, h] with part [B, h, Q, d]."""
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


# --- which blocks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The calls of a pack: `own` cover every row once; each of `above` adds keys to rows that `own` has covered."""

    own: list[Call]
    above: list[Call]


def plan(pack: Pack) -> Plan:
    """Every branch on itself, and all rows below a branch on the whole branch; where a few small branches follow each
    other, they are one block. Under context parallelism for the queries of this rank's rows (no branch is on both sides
    of their bounds)."""
    own, above = _blocks(pack.branches, pack.rows)
    kinds = [[block for block in own if block.kind == kind] for kind in (CAUSAL, TREE)]
    levels = [[block for _, block in level] for _, level in groupby(sorted(above), key=lambda entry: entry[0])]
    return Plan(
        [call for blocks in kinds for call in _calls(blocks, pack.ends)],
        [call for blocks in levels for call in _calls(blocks, pack.ends)],  # those of one depth have rows of their own
    )


def _blocks(branches: Sequence[Branch], rows: tuple[int, int]) -> tuple[list[Block], list[tuple[int, Block]]]:
    """Blocks of rows on themselves; those on what is above them, with its depth."""
    first, last = rows
    begins = [branch.begin for branch in branches]
    own: list[Block] = []
    above: list[tuple[int, Block]] = []

    def queries(begin: int, end: int) -> tuple[int, int]:
        return max(begin, first) - first, min(end, last) - first

    def together(start: int, stop: int) -> bool:
        """Whether some branches after each other run as one block; then that is noted."""
        span = (branches[start].begin, branches[stop - 1].end) if stop - start > 1 else (0, 0)
        if not span[1] or span[0] < first or span[1] > last or not _small(branches[start:stop]):
            return False
        own.append(Block(queries(*span), span, TREE))
        return True

    number = 0
    while number < len(branches):
        branch, after = branches[number], bisect_left(begins, branches[number].leave)
        if together(number, after):
            number = after
            continue
        if first <= branch.begin < last:
            own.append(Block(queries(branch.begin, branch.end), (branch.begin, branch.end), CAUSAL))
        if max(branch.end, first) < min(branch.leave, last):
            block = Block(queries(branch.end, branch.leave), (branch.begin, branch.end), ALL)
            above.append((branch.depth, block))
        number = after if together(number + 1, after) else number + 1
    return own, above


def _small(branches: Sequence[Branch]) -> bool:
    """Whether one block of all pairs costs less than a block for each branch and one for what is below each."""
    rows = branches[-1].end - branches[0].begin
    if rows * rows > 2 * len(branches) * (SPARE_PAIRS_OF_BLOCKS + rows):  # before all are looked at
        return False
    blocks = len(branches) + sum(b.leave > b.end for b in branches)
    pairs = sum((b.end - b.begin) * (b.leave - b.begin) for b in branches)
    return rows * rows - pairs <= (blocks - 1) * SPARE_PAIRS_OF_BLOCKS


def _calls(blocks: list[Block], ends: Tensor) -> list[Call]:
    """Blocks in batches: as many calls fewer as the pairs that their padding adds allow."""
    batches: list[list[Block]] = []
    widest, longest, real = 0, 0, 0  # of the last batch: most keys, most queries, pairs that are no padding
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
    return [Call(batch, ends) for batch in batches]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
