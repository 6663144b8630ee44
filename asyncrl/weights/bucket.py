"""Greedy byte-bounded buckets over a list of tensors. Pure: planned from names, dtypes and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from asyncrl.weights.layouts import Pieces


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket; `start` and `end` are byte offsets within it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


Bucket = list[Entry]


INSEPARABLE = {"self_attn.kv_a_proj_with_mqa.weight": "self_attn.q_a_proj.weight"}
"""HF tensors, with their scales, that an engine must get in one call: SGLang's deepseek_v2.py fuses the two only if it
sees both, and otherwise silently keeps the old weights."""


def unit_of(hf_name: str) -> str:
    """Return a key that is equal for tensors that must arrive together, among them a weight and its scales."""
    hf_name = hf_name.removesuffix("_inv").removesuffix("_scale")
    for name, leader in INSEPARABLE.items():
        if hf_name.endswith(name):
            return hf_name.removesuffix(name) + leader
    return hf_name


def plan_buckets(
    tensors: Iterable[tuple[str, torch.dtype, torch.Size]],
    limit: int,
    *,
    together: Callable[[str], str] = lambda name: name,
) -> list[Bucket]:
    """Divide tensors, in their order, into buckets of at most `limit` bytes. A larger tensor gets its own bucket and is
    never split.

    Consecutive tensors for whose names `together` returns the same key stay in one bucket.

    Receivers view the flat bytes in place and find each tensor at the sum of the preceding sizes. A bucket therefore
    has no gaps, and its wider dtypes come first, so that every offset is a multiple of its tensor's item size.
    """
    buckets: list[Bucket] = []
    members: list[tuple[str, torch.dtype, torch.Size]] = []
    size = 0
    for _, unit in groupby(tensors, key=lambda tensor: together(tensor[0])):
        inseparable = list(unit)
        added = sum(shape.numel() * dtype.itemsize for _, dtype, shape in inseparable)
        if members and size + added > limit:
            buckets.append(_laid_out(members))
            members, size = [], 0
        members += inseparable
        size += added
    return [*buckets, _laid_out(members)] if members else buckets


def _laid_out(members: list[tuple[str, torch.dtype, torch.Size]]) -> Bucket:
    bucket: Bucket = []
    for name, dtype, shape in sorted(members, key=lambda member: -member[1].itemsize):  # stable
        start = bucket[-1].end if bucket else 0
        bucket.append(Entry(name, dtype, shape, start, start + shape.numel() * dtype.itemsize))
    return bucket


def nbytes(bucket: Bucket) -> int:
    """Return the size of a bucket in bytes."""
    return bucket[-1].end if bucket else 0


def views(flat: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    """Return the tensors of a bucket by name, as views of its bytes (uint8)."""
    return {entry.name: flat[entry.start : entry.end].view(entry.dtype).view(entry.shape) for entry in bucket}


def fill(flat: Tensor, bucket: Bucket, stream: Iterator[tuple[str, Pieces]]) -> dict[str, Tensor]:
    """Copy the stream's next tensors to their places in `flat`. Returns the views."""
    places = views(flat, bucket)
    for _ in bucket:
        name, pieces = next(stream)
        assert name in places, f"the stream yielded {name}, which is not planned for this bucket"
        pieces.copy_to(places[name])
    return places
