"""Prompts of a cohort are started in the order of their expected lengths, and none is skipped (rollout.start_order)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.hooks import by_weight
from asyncrl.rollout.order import Order, OrderState, StartOrder
from asyncrl.schema import Prompt
from tests.fakes import LengthTask, group, tiny_config

ORDERS = ("in_order", "shortest_first", "longest_first")


def questions(size: int) -> Iterator[Prompt]:
    """The same questions in every epoch."""
    return (Prompt(f"p{number}", [], {}, "length", number % size) for number in itertools.count())


def drawing(size: int, drawn: list[str] | None = None) -> Callable[[], Prompt]:
    stream = questions(size)

    def draw() -> Prompt:
        prompt = next(stream)
        if drawn is not None:
            drawn.append(prompt.uid)
        return prompt

    return draw


def of_length(tokens: int) -> Any:
    return group(rewards=[0.0, 1.0], tokens=tokens)


@given(
    st.sampled_from(ORDERS),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=30),
)
def test_every_prompt_of_a_cohort_is_started_once_before_the_next_are_drawn(
    order: Order, cohort: int, played: list[tuple[int, int]]
) -> None:
    started, ends = StartOrder(order, cohort), iter(played)
    draw, found = drawing(7), []
    for _ in range(6 * cohort):
        found.append(started.next(draw, lambda task: None).uid)
        for index, tokens in itertools.islice(ends, 2):
            started.record(of_length(tokens), index)
    for first in range(0, len(found), cohort):
        expected = [f"p{number}" for number in range(first, first + cohort)]
        of_cohort = found[first : first + cohort]
        assert (of_cohort if order == "in_order" else sorted(of_cohort)) == (
            expected if order == "in_order" else sorted(expected)
        )


@pytest.mark.parametrize(
    ("order", "expected"),
    [("in_order", [0, 1, 2, 3]), ("shortest_first", [2, 1, 3, 0]), ("longest_first", [0, 1, 3, 2])],
)
def test_prompts_are_ordered_by_their_last_answers_or_those_of_their_task(order: Order, expected: list[int]) -> None:
    """Those that are expected to be as long come as they were drawn."""
    started = StartOrder(order, 4)
    for index, tokens in [(0, 1), (0, 9), (2, 2)]:
        started.record(of_length(tokens), index)
    draw = drawing(100)
    assert [started.next(draw, lambda task: 5.0).index for _ in range(4)] == expected


def test_prompts_in_order_are_drawn_one_by_one() -> None:
    drawn: list[str] = []
    started = StartOrder("in_order", 4)
    draw = drawing(100, drawn)
    for number in range(3):
        started.next(draw, lambda task: 1.0)
        assert len(drawn) == number + 1


@given(st.sampled_from(ORDERS), st.integers(0, 9))
def test_prompts_that_wait_are_saved_and_started_first(order: Order, started: int) -> None:
    first = StartOrder("shortest_first", 4)
    draw = drawing(100)
    for index in range(20):
        first.record(of_length(1 + index * 7 % 5), index)
    before = [first.next(draw, lambda task: 1.0).index for _ in range(started)]
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state()), type=OrderState)
    again = StartOrder(order, 4)
    again.restore(saved, lambda uid, task, index: Prompt(uid, [], {}, task, index))
    after = [again.next(draw, lambda task: 1.0).index for _ in range(12 - started)]
    assert sorted(before + after) == list(range(12))
    rest = [first.next(lambda: Prompt("", [], {}, "length", 99), lambda task: 1.0).index for _ in saved.waiting]
    if order == "shortest_first":
        assert after[: len(rest)] == rest


@pytest.mark.parametrize("size", [None, 10])
def test_lengths_of_a_task_are_those_of_recent_groups_and_of_its_questions_if_they_come_again(size: int | None) -> None:
    task: Any = LengthTask()
    task.size = size
    mixer = Mixer(
        {"length": task}, {"length": questions(10)}, {"length": 1.0}, by_weight, 0, StartOrder("longest_first", 3)
    )
    mixer.record(of_length(2), 0)
    mixer.record(of_length(8), 2)
    assert mixer._progress_of("length").tokens == 5.0
    assert [mixer.draw(0).index for _ in range(3)] == ([0, 1, 2] if size is None else [2, 1, 0])


def test_an_order_is_refused_where_timing_must_not_matter() -> None:
    changes = {"deterministic": True, "rollout.max_staleness": 0, "rollout.lead": None}
    with pytest.raises(ConfigError, match=r"rollout\.start_order=in_order") as refused:
        tiny_config(**changes, **{"rollout.start_order": "shortest_first"})
    assert refused.value.field == "deterministic"
    tiny_config(**changes)
