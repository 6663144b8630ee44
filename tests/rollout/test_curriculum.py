"""Prompts are mixed by the weights that a curriculum gives, in an order that the seed fixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.curriculum import WINDOW, Curriculum, CurriculumInput, Mixer, TaskProgress
from asyncrl.rollout.hooks import by_weight, towards_half_solved
from tests.fakes import group, mixer

NAMES = ("sort", "sum", "copy")


def drawn(mixer: Mixer, count: int) -> list[str]:
    return [mixer.draw(0).task for _ in range(count)]


def fixed(weights: Any) -> Curriculum:
    return lambda progress: weights


def test_prompts_come_in_proportion_to_the_weights_and_each_stream_in_its_order() -> None:
    mixed = mixer(*NAMES, sum=3.0, copy=4.0)
    prompts = [mixed.draw(0) for _ in range(8000)]
    shares = Counter(prompt.task for prompt in prompts)
    assert [shares[name] / 1000 for name in NAMES] == pytest.approx([1, 3, 4], rel=0.1)
    for first, name in zip((0, 1000, 2000), NAMES, strict=True):
        assert [p.token_ids[1] for p in prompts if p.task == name] == list(range(first, first + shares[name]))


outcomes = st.lists(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 2)), max_size=3), max_size=30)


@given(st.integers(0, 99), outcomes, st.sampled_from([0.25, 2.0, 8.0]))
def test_sequence_is_a_function_of_the_seed_and_the_weights_alone(
    seed: int, played: list[list[tuple[str, float]]], scale: float
) -> None:
    """Whatever was played in between, and in whatever unit weights are given."""
    quiet, busy = (mixer(*NAMES, seed=seed, sum=3.0) for _ in range(2))
    scaled = mixer(*NAMES, seed=seed, sort=scale, sum=3 * scale, copy=scale)
    sequence = []
    for version, ended in enumerate(played):
        for task, reward in ended:
            busy.record(group(task=task, rewards=[reward, 0.0]))
        sequence.append(busy.draw(version).token_ids)
    assert sequence == [quiet.draw(0).token_ids for _ in played]
    assert sequence == [scaled.draw(0).token_ids for _ in played]


def test_other_seeds_give_other_sequences() -> None:
    assert len({tuple(drawn(mixer(*NAMES, seed=seed), 30)) for seed in range(8)}) == 8


def test_weights_of_one_draw_do_not_change_the_chance_of_later_ones() -> None:
    """Every draw takes one number of the generator, whatever the weights."""
    asked: list[CurriculumInput] = []

    def late(progress: CurriculumInput) -> dict[str, float]:
        asked.append(progress)
        return {"sum": 1.0} if len(asked) <= 10 else by_weight(progress)  # type: ignore[return-value]

    assert drawn(mixer(*NAMES, curriculum=late), 40)[10:] == drawn(mixer(*NAMES), 40)[10:]


def test_task_without_weight_is_not_drawn() -> None:
    assert set(drawn(mixer(*NAMES, curriculum=fixed({"sum": 1, "copy": 0.0})), 200)) == {"sum"}


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"sort": 1.0, "sums": 1.0}, r"got 'sums'. There is no such task; choose among \['copy', 'sort', 'sum'\]"),
        ({"sort": 1.0, "sum": -0.5}, "Weights must be finite and not negative"),
        ({"sort": 0.0}, "at least one must be above 0"),
        ({}, "at least one must be above 0"),
        ({"sort": float("nan"), "sum": 1.0}, "finite"),
        ({"sort": float("inf"), "sum": 1.0}, "finite"),
        ({"sort": 1e308, "sum": 1e308}, "finite"),
        ({"sort": "1", "sum": 1.0}, "must be finite"),
        (None, "Must return a mapping of task names to weights"),
    ],
)
def test_impossible_weights_name_the_setting_and_what_was_given(weights: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        mixer(*NAMES, curriculum=fixed(weights)).draw(0)
    assert caught.value.field == "rollout.curriculum"


def test_progress_tells_version_weight_and_the_recent_groups_of_each_task() -> None:
    asked: list[CurriculumInput] = []

    def spy(progress: CurriculumInput) -> dict[str, float]:
        asked.append(progress)
        return {"sort": 1.0}

    mixed = mixer(*NAMES, curriculum=spy, sum=3.0)
    mixed.record(group(task="sum", rewards=[0.0, 0.0, 2.0, 0.0]))  # a reward above 0 is a right answer here
    mixed.record(group(task="sum", rewards=[1.0, 1.0]))
    mixed.draw(5)
    assert asked[-1].version == 5
    assert asked[-1].tasks == {
        "sort": TaskProgress(1.0, 0, None, None, None),
        "sum": TaskProgress(3.0, 2, 0.75, 0.625, 2.0),
        "copy": TaskProgress(1.0, 0, None, None, None),
    }
    for _ in range(WINDOW):
        mixed.record(group(task="sum", rewards=[0.0, 0.0]))
    mixed.draw(6)
    assert asked[-1].tasks["sum"] == TaskProgress(3.0, WINDOW + 2, 0.0, 0.0, 2.0)


def progress(**solved: float | None) -> CurriculumInput:
    return CurriculumInput(0, {name: TaskProgress(2.0, 9, share, share, 100.0) for name, share in solved.items()})


def test_half_solved_tasks_are_preferred_and_none_is_given_up() -> None:
    weights = towards_half_solved(progress(half=0.5, hard=0.1, easy=0.9, hopeless=0.0, done=1.0, new=None))
    assert weights == pytest.approx({"half": 2.0, "hard": 0.72, "easy": 0.72, "hopeless": 0.2, "done": 0.2, "new": 2.0})


def test_mixture_follows_what_the_model_can_solve() -> None:
    mixed = mixer(*NAMES, curriculum=towards_half_solved)
    for name, right in (("sort", 0), ("sum", 4), ("copy", 8)):
        for _ in range(WINDOW):
            mixed.record(group(task=name, rewards=[1.0] * right + [0.0] * (8 - right)))
    shares = Counter(drawn(mixed, 1200))
    assert [shares[name] / 100 for name in NAMES] == pytest.approx([1, 10, 1], rel=0.3)
