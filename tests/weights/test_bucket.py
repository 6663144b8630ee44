"""Buckets: every tensor once, in order, within the limit, aligned, without gaps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.bucket import fill, nbytes, plan_buckets
from asyncrl.weights.layouts import Pieces

tensors = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        st.lists(st.integers(0, 5), max_size=3).map(torch.Size),
    ),
    max_size=25,
).map(lambda found: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)])


@given(tensors, st.integers(1, 200))
def test_every_tensor_is_planned_once_whole_and_in_order(described, limit) -> None:
    buckets = plan_buckets(iter(described), limit)
    rest = list(described)
    for bucket in buckets:
        here, rest = rest[: len(bucket)], rest[len(bucket) :]
        assert sorted((e.name, str(e.dtype), e.shape) for e in bucket) == sorted((n, str(d), s) for n, d, s in here)
        assert all(entry.end - entry.start == entry.shape.numel() * entry.dtype.itemsize for entry in bucket)
    assert not rest


@given(tensors, st.integers(1, 200))
def test_bucket_is_aligned_without_gaps(described, limit) -> None:
    for bucket in plan_buckets(described, limit):
        assert bucket[0].start == 0
        assert all(first.end == second.start for first, second in pairwise(bucket))
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in bucket)


@given(tensors, st.integers(1, 200))
def test_bucket_keeps_the_limit_unless_one_tensor_is_larger(described, limit) -> None:
    buckets = plan_buckets(described, limit)
    first_of = {name: shape.numel() * dtype.itemsize for name, dtype, shape in described}
    order = {name: place for place, (name, _, _) in enumerate(described)}
    for bucket in buckets:
        assert nbytes(bucket) <= limit or len(bucket) == 1
    for first, second in pairwise(buckets):
        following = min((entry.name for entry in second), key=order.__getitem__)
        assert nbytes(first) + first_of[following] > limit


def test_by_hand() -> None:
    described = [
        (name, torch.float32, torch.Size([n])) for name, n in (("a", 2), ("b", 2), ("c", 1), ("d", 9), ("e", 1))
    ]
    described.insert(2, ("h", torch.bfloat16, torch.Size([1])))
    planned = [[(e.name, e.start, e.end) for e in bucket] for bucket in plan_buckets(described, 16)]
    assert planned == [[("a", 0, 8), ("b", 8, 16)], [("c", 0, 4), ("h", 4, 6)], [("d", 0, 36)], [("e", 0, 4)]]


@given(tensors, st.integers(1, 200), st.integers(1, 4))
def test_inseparable_neighbours_share_a_bucket(described, limit, size) -> None:
    def word(name: str) -> str:
        return str(int(name[1:]) // size)

    buckets = plan_buckets(described, limit, together=word)
    homes: dict[str, set[int]] = {}
    for number, bucket in enumerate(buckets):
        for entry in bucket:
            homes.setdefault(word(entry.name), set()).add(number)
    assert all(len(home) == 1 for home in homes.values())
    assert sum(len(bucket) for bucket in buckets) == len(described)


@given(tensors, st.integers(1, 200))
def test_filled_buckets_hold_every_tensor_bit_for_bit(described, limit) -> None:
    given_ = {n: torch.randint(0, 256, (s.numel() * d.itemsize,), dtype=torch.uint8) for n, d, s in described}
    stream = ((name, Pieces([given_[name].view(dtype).view(shape)])) for name, dtype, shape in described)
    for bucket in plan_buckets(described, limit):
        flat = torch.zeros(nbytes(bucket), dtype=torch.uint8)
        fill(flat, bucket, stream)
        for entry in bucket:
            assert flat[entry.start : entry.end].equal(given_[entry.name])
    assert next(stream, None) is None


def test_a_stream_in_another_order_is_refused() -> None:
    plan = plan_buckets([("a", torch.float32, torch.Size([1])), ("b", torch.float32, torch.Size([1]))], 4)
    with pytest.raises(AssertionError, match="yielded b"):
        fill(torch.zeros(4, dtype=torch.uint8), plan[0], iter([("b", Pieces([torch.zeros(1)]))]))


def test_nothing_to_send_is_no_bucket() -> None:
    assert plan_buckets([], 16) == []
