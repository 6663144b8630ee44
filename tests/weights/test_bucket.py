"""Buckets: every tensor once, in order, within the limit, one dtype, without gaps."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.bucket import plan_buckets

tensors = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        st.lists(st.integers(0, 5), max_size=3).map(torch.Size),
    ),
    max_size=25,
).map(lambda found: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)])


@given(tensors, st.integers(1, 200))
def test_every_tensor_is_planned_once_in_order_and_whole(described, limit) -> None:
    entries = [entry for bucket in plan_buckets(iter(described), limit) for entry in bucket]
    assert [(entry.name, entry.dtype, entry.shape) for entry in entries] == described
    assert all(entry.end - entry.start == entry.shape.numel() * entry.dtype.itemsize for entry in entries)


@given(tensors, st.integers(1, 200))
def test_bucket_is_contiguous_of_one_dtype_and_aligned_to_it(described, limit) -> None:
    for bucket in plan_buckets(described, limit):
        assert bucket[0].start == 0
        assert all(first.end == second.start for first, second in pairwise(bucket))
        assert len({entry.dtype for entry in bucket}) == 1
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in bucket)


@given(tensors, st.integers(1, 200))
def test_bucket_is_within_the_limit_unless_one_tensor_alone_is_larger_and_none_is_cut_short(described, limit) -> None:
    buckets = plan_buckets(described, limit)
    for bucket in buckets:
        assert bucket[-1].end <= limit or len(bucket) == 1
    for first, second in pairwise(buckets):
        full = first[-1].end + second[0].end > limit
        assert full or first[-1].dtype != second[0].dtype


def test_by_hand() -> None:
    described = [
        (name, torch.float32, torch.Size([n])) for name, n in (("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1))
    ]
    described.append(("f", torch.bfloat16, torch.Size([1])))
    planned = [[(e.name, e.start, e.end) for e in bucket] for bucket in plan_buckets(described, 16)]
    assert planned == [[("a", 0, 8), ("b", 8, 16)], [("c", 0, 4)], [("d", 0, 36)], [("e", 0, 4)], [("f", 0, 2)]]


def test_nothing_to_send_is_no_bucket() -> None:
    assert plan_buckets([], 16) == []
