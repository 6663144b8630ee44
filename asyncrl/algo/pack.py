"""A pack: samples as one row of tokens in which every common prefix appears once.

Any common prefix of sequences runs once, with gradient: what all groups share (system message, worked examples), the
prompt of a group, the turns that siblings share. The values are those of separate sequences, at a fraction of the work.
Example with two groups (common prefix R, prompts P1 P2, completions a b c d):

    row    R  R  R  P  P  a  a  b  b  b  P  c  c  d  d     depth first: a token comes after all that it attends to
    ends   15 15 15 10 10 7  7  10 10 10 15 13 13 15 15    row i attends to row j if j <= i < ends[j]

Hidden states become logits only at the rows that predict a trained token. A token that several siblings share appears
once and has one row of logits, but each sibling has its own target with its own row of the table, because their
advantages differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.samples import Sample
from asyncrl.schema import POLICY

WORTH = 16
"""Maximum number of rows attending to a separate segment for each token that the separation saves. Such a row costs
some passes over its heads per layer; a token costs the products with all weights of the layer, 20 times as much in the
smallest real model."""


class Branch(NamedTuple):
    """Rows begin..end-1 attend to themselves causally; rows end..leave-1 attend to all of them."""

    begin: int
    end: int
    leave: int
    depth: int  # number of branches above it


@dataclass(frozen=True, eq=False)
class Pack:
    """A packed micro-batch: N tokens in a row, U rows of logits, T trained tokens."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position within the token's own sequence, on all ranks
    ends: Tensor  # [N] int64, one past the last row that attends to the token
    branches: tuple[Branch, ...]  # the same as ranges of rows, which together cover all rows
    logit_rows: Tensor  # [U] int64, row index of each hidden state that becomes logits
    row_of_target: Tensor  # [T] int64 into logit_rows
    targets: Tensor  # [T] int64
    table_rows: Tensor  # [T] int64, row of each target in the batch's table
    tokens_apart: int  # tokens that would go through the model without sharing
    # Under context parallelism, token_ids, logit_rows and targets hold only this rank's part.
    own_targets: Tensor | None = None  # which of the T trained tokens belong to this part
    bounds: tuple[int, ...] = ()  # first row of each rank, and the end
    part: int = 0
    rope: Tensor | None = None  # [3, N] int64, position in time, height and width, if some sample has images
    images: tuple[str, ...] = ()  # names of the images that stand in rows that this rank embeds
    image_rows: Tensor | None = None  # [M] int64, these rows, counted from the first that this rank embeds
    image_places: Tensor | None = None  # [M] int64, which of all tokens of `images` stands there
    keys: Tensor | None = None  # [N] int64 on the host, each token's number in an extension's index, or -1
    model: str = POLICY  # that computes it, of several that are trained

    @property
    def num_tokens(self) -> int:
        """Number of tokens that go through the model, on all context-parallel ranks."""
        return len(self.ends)

    @property
    def rows(self) -> tuple[int, int]:
        """Range of the rows of this part."""
        return (self.bounds[self.part], self.bounds[self.part + 1]) if self.bounds else (0, len(self.ends))

    @property
    def own_positions(self) -> Tensor:
        """The positions of the rows of this part."""
        return self.positions[slice(*self.rows)]

    def to(self, device: torch.device) -> Pack:
        """Return the pack on another device."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            k: x.to(device, non_blocking=device.type == "cuda") if isinstance(x, Tensor) and k != "keys" else x
            for k, x in own.items()
        }
        return Pack(**moved)


def pack(groups: Sequence[Sequence[Sample]], *, share: bool = True, multiple: int = 1) -> Pack:
    """Build one pack of all samples that have a trained token. Without `share` each sample runs separately, for
    comparison. The row is padded to a multiple of `multiple` tokens (sequence parallelism splits it evenly)."""
    samples = [sample for group in groups for sample in group if sample.num_inputs]
    sequences = [np.array(inputs(sample), dtype=np.int64) for sample in samples]
    if not samples:  # a pack without work still goes through the model
        sequences = [np.array(next(sample for group in groups for sample in group).prompt_ids[:1], dtype=np.int64)]
    order, common = _sorted(sequences) if share else (list(range(len(sequences))), [0] * (len(sequences) - 1))
    tree = tree_segments([len(sequences[i]) for i in order], common)
    rows_of, branches = _rows(tree, [sequences[i] for i in order])
    filled = branches[-1].end
    padding = -filled % multiple
    if padding:
        branches.append(Branch(filled, filled + padding, filled + padding, 0))

    token_ids, positions = np.zeros(filled + padding, np.int64), np.zeros(filled + padding, np.int64)
    for number, sequence in enumerate(order):
        token_ids[rows_of[number]] = sequences[sequence]
        positions[rows_of[number]] = np.arange(len(sequences[sequence]))
    place = {sequence: number for number, sequence in enumerate(order)}
    rows, targets, table_rows = _targets(samples, [rows_of[place[i]] for i in range(len(samples))])
    logit_rows, row_of_target = np.unique(rows, return_inverse=True)
    if not len(logit_rows):
        logit_rows = np.zeros(1, np.int64)
    return Pack(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        torch.from_numpy(np.repeat([b.leave for b in branches], [b.end - b.begin for b in branches])),
        tuple(branches),
        torch.from_numpy(logit_rows),
        torch.from_numpy(row_of_target.astype(np.int64)),
        torch.from_numpy(targets),
        torch.from_numpy(table_rows),
        sum(map(len, sequences)),
        rope=_rope(samples, [rows_of[place[i]] for i in range(len(samples))], positions),
        keys=_keys(samples, [rows_of[place[i]] for i in range(len(samples))], filled + padding),
    )


def _rope(samples: list[Sample], rows_of: list[np.ndarray], positions: np.ndarray) -> Tensor | None:
    """Return each row's three positions, which are equal in samples without images, or None if no sample has any."""
    if not any(sample.images for sample in samples):
        return None
    rope = np.tile(positions, (3, 1))
    for sample, rows in zip(samples, rows_of, strict=True):
        if sample.rope is not None:
            rope[:, rows] = sample.rope[:, : len(rows)]
    return torch.from_numpy(rope)


def _keys(samples: list[Sample], rows_of: list[np.ndarray], length: int) -> Tensor | None:
    """Return each row's key, or None if the samples have none."""
    if not samples or samples[0].keys is None:
        return None
    keys = torch.full((length,), -1)
    for sample, rows in zip(samples, rows_of, strict=True):
        assert sample.keys is not None
        keys[torch.from_numpy(rows)] = sample.keys[: len(rows)]
    return keys


def inputs(sample: Sample) -> list[int]:
    """Return the input tokens of a sample: all tokens before its last trained token."""
    return sample.prompt_ids + sample.token_ids[: sample.num_inputs - len(sample.prompt_ids)]


def _sorted(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Sort the sequences by their tokens, and count the leading tokens that neighbors share. Big-endian bytes sort like
    numbers."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = []
    for a, b in pairwise(order):
        length = min(len(sequences[a]), len(sequences[b]))
        differ = sequences[a][:length] != sequences[b][:length]
        common.append(int(differ.argmax()) if differ.any() else length)
    return order, common


def _rows(tree: list[TreeSegment], sequences: list[np.ndarray]) -> tuple[list[np.ndarray], list[Branch]]:
    """Return the rows of each sequence's tokens, and the branches, one per segment."""
    rows_of = [np.empty(len(sequence), np.int64) for sequence in sequences]
    ends: list[int] = []
    depths: list[int] = []
    for stretch in tree:
        begin = ends[-1] if ends else 0
        ends.append(begin + stretch.stop - stretch.start)
        depths.append(depths[stretch.parent] + 1 if stretch.parent >= 0 else 0)
        for number in range(stretch.first, stretch.last):
            rows_of[number][stretch.start : stretch.stop] = np.arange(begin, ends[-1])
    leaves = exits([stretch.parent for stretch in tree], ends)
    begins = [0, *ends[:-1]]
    return rows_of, [Branch(*branch) for branch in zip(begins, ends, leaves, depths, strict=True)]


def _targets(samples: list[Sample], rows_of: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each trained token in the order of the samples, the row that predicts it, the token, and its row in
    the table."""
    rows, targets, table_rows = ([np.zeros(0, np.int64)] for _ in range(3))
    for sample, own in zip(samples, rows_of, strict=True):
        trained = np.flatnonzero(sample.mask)
        rows.append(own[len(sample.prompt_ids) + trained - 1])
        targets.append(np.array(sample.token_ids, np.int64)[trained])
        table_rows.append(np.arange(sample.first_row, sample.first_row + len(trained)))
    return np.concatenate(rows), np.concatenate(targets), np.concatenate(table_rows)


# -- the prefix tree --------------------------------------------------------------------------------------------


class TreeSegment(NamedTuple):
    """Tokens start..stop-1 of the sequences first..last-1."""

    first: int
    last: int
    start: int
    stop: int
    parent: int  # index of the segment before it, or -1


def tree_segments(lengths: Sequence[int], common: Sequence[int]) -> list[TreeSegment]:
    """Return the segments of sequences in sorted order (so that those with longer common prefixes are neighbors), depth
    first. `common[i]` is the number of leading tokens that sequences i and i + 1 share.

        A B C x y     A B C x z z     A B q         lengths 5 6 3      common 4 2
        segments, a parent before its children: A B | C x | y | z z | q

    A common segment appears once if that saves enough, and otherwise once before each of the parts that follow it.
    """
    found: list[TreeSegment] = []
    todo = [(0, len(lengths), 0, -1)]
    while todo:
        first, last, start, parent = todo.pop()
        if last - first == 1:
            if lengths[first] > start:
                found.append(TreeSegment(first, last, start, lengths[first], parent))
            continue
        stop = min(common[first : last - 1])
        parts = [first, *(i + 1 for i in range(first, last - 1) if common[i] == stop), last]
        saved = (len(parts) - 2) * (stop - start)
        below = sum(lengths[first:last]) - (last - first) * stop
        if saved > 0 and WORTH * saved >= below:
            found.append(TreeSegment(first, last, start, stop, parent))
            start, parent = stop, len(found) - 1
        todo += [(*part, start, parent) for part in reversed(list(pairwise(parts)))]
    return found


def exits(parents: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return, for segments laid out one after the other, where the last descendant of each ends. `ends` holds their own
    ends."""
    found = list(ends)
    for child in range(len(parents) - 1, -1, -1):
        if parents[child] >= 0:
            found[parents[child]] = max(found[parents[child]], found[child])
    return found


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two lists share. Uses bisection, so that lists are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
