"""Stretches of a flattened tensor as boxes: every element in one box, at its place."""

from __future__ import annotations

import warnings

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.platforms import here

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    here().prepare_trainer()
    from asyncrl.trainer.sharding import Box, boxes

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_boxes_hold_each_element_once_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, numbers.numel())] * 2)))
    found = [
        number
        for offset, size in boxes(shape, start, end)
        for number in numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten().tolist()
    ]
    assert found == list(range(start, end))
    assert len(list(boxes(shape, start, end))) <= max(1, 2 * len(shape) - 1)


@given(data=st.data(), rows=st.integers(1, 6), columns=st.integers(1, 6), above=st.integers(0, 3))
def test_parts_of_a_box_lie_where_its_elements_lie_in_the_whole(
    data: st.DataObject, rows: int, columns: int, above: int
) -> None:
    whole = torch.arange((rows + above) * columns).view(1, rows + above, columns)
    local = torch.cat([torch.full((7,), -1), whole[0, above:].flatten()])  # the box begins at element 7
    box = Box("k", tuple(whole.shape), (0, above, 0), (1, rows, columns), 7)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(local))] * 2)))
    found = []
    for part in box.within(start, end):
        assert (part.key, part.whole) == (box.key, box.whole)
        place = tuple(slice(o, o + s) for o, s in zip(part.offset, part.size, strict=True))
        assert torch.equal(whole[place].flatten(), local[part.start : part.start + part.numel])
        found += list(range(part.start, part.start + part.numel))
    assert found == list(range(max(7, start), max(7, end)))
