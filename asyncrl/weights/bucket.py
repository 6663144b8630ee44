"""Greedy byte-bounded buckets over a list of tensors. Pure: the plan is made from names, dtypes and shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket; `start` and `end` are bytes within it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


def plan_buckets(tensors: Iterable[tuple[str, torch.dtype, torch.Size]], limit: int) -> list[list[Entry]]:
    """Tensors in order, in buckets of at most `limit` bytes; a larger tensor travels alone, never split.

    A bucket holds one dtype: receivers view the flat bytes in place, so offsets must be multiples of the item size.
    """
    buckets: list[list[Entry]] = []
    size = 0
    for name, dtype, shape in tensors:
        nbytes = shape.numel() * dtype.itemsize
        if not buckets or size + nbytes > limit or buckets[-1][-1].dtype != dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(Entry(name, dtype, shape, size, size + nbytes))
        size += nbytes
    return buckets
