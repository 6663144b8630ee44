"""Positions of this rank's tensors in the whole model, as boxes of Megatron's checkpoint keys.

A box is a cuboid of the tensor that tensor, pipeline and expert parallelism of degree 1 would hold. Megatron gives the
box of each parameter (`sharded_state_dict`). Its distributed optimizer gives each data-parallel rank a range of the
flattened parameter, which is at most three boxes for a matrix: part of a row, whole rows, part of a row. With boxes,
every rank writes and reads its own data under any layout, without gathering anything.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from asyncrl.weights.reshard import weights_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements [start, start + the product of `size`) of a flattened local tensor, and their position in `key`."""

    key: str
    whole: Shape  # shape of the tensor that the key names
    offset: Shape
    size: Shape
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def within(self, start: int, end: int) -> Iterator[Box]:
        """Yield the parts of this box that lie in elements [start, end) of the local tensor."""
        first, last = max(start, self.start) - self.start, min(end, self.start + self.numel) - self.start
        for offset, size in boxes(self.size, first, last):
            at = sum(o * math.prod(self.size[axis + 1 :]) for axis, o in enumerate(offset))
            place = tuple(mine + more for mine, more in zip(self.offset, offset, strict=True))
            yield Box(self.key, self.whole, place, size, self.start + at)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of this rank, and its boxes."""

    tensor: Tensor
    boxes: tuple[Box, ...]
    ours: bool  # of the ranks with the same shard, this one and its data-parallel peers write it
    first: bool  # this rank is the first of them


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the boxes (offset, size) that cover elements [start, end) of a row-major tensor, in order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = math.prod(inner)

    def within_row(index: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
        for offset, size in boxes(inner, start - index * row, end - index * row):
            yield (index, *offset), (1, *size)

    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        yield from within_row(last, start, end)
        return
    yield from within_row(first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from within_row(last, last * row, end)


def placed(chunks: list[GPTModel], vocab_size: int) -> list[PlacedTensor]:
    """Return every parameter and persistent buffer of these chunks of layers. The vocabulary's padding, which differs
    between layouts, belongs to no box."""
    tensors = [tensor for chunk in chunks for tensor in weights_of(chunk, keep_vars=True).values()]
    tensors = sorted({t.data_ptr(): t for t in tensors if t.numel()}.values(), key=lambda t: t.data_ptr())
    starts = [tensor.data_ptr() for tensor in tensors]
    found: dict[int, list[ShardedTensor]] = {number: [] for number in range(len(tensors))}
    for chunk in chunks:
        states = chunk.sharded_state_dict()
        apply_factories(states)  # stores gate and up as separate rows, whatever the layout
        for sharded in _sharded(states):
            assert sharded.data is not None, f"{sharded.key} has no data"
            found[bisect_right(starts, sharded.data.data_ptr()) - 1].append(sharded)
    return [_placed(tensors[number], parts, vocab_size) for number, parts in found.items() if parts]


def _placed(tensor: Tensor, parts: list[ShardedTensor], vocab_size: int) -> PlacedTensor:
    replicas = {(part.replica_id,) if isinstance(part.replica_id, int) else part.replica_id for part in parts}
    (replica,) = replicas
    boxes = [box for part in parts if (box := _box(tensor, part, vocab_size)).numel]
    return PlacedTensor(tensor, tuple(boxes), ours=not any(replica[:-1]), first=not any(replica))


def _box(tensor: Tensor, part: ShardedTensor, vocab_size: int) -> Box:
    data, axis = part.data, part.prepend_axis_num
    assert data is not None
    assert data.is_contiguous(), f"{part.key} is not contiguous"
    start = (data.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    whole, size = list(part.global_shape), [1] * axis + list(part.local_shape)
    if part.allow_shape_mismatch:  # rows of the vocabulary
        whole[axis] = vocab_size
        size[axis] = max(0, min(size[axis], vocab_size - part.global_offset[axis]))
    return Box(part.key, tuple(whole), tuple(part.global_offset), tuple(size), start)


def _sharded(states: Any) -> Iterator[ShardedTensor]:
    if isinstance(states, ShardedTensor):
        yield states
    elif isinstance(states, dict | list | tuple):
        for state in states.values() if isinstance(states, dict) else states:
            yield from _sharded(state)
