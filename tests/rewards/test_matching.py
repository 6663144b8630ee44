"""Answers compared by their text, at the borders of each rule, and in no more time than their length explains."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.rewards import build
from asyncrl.rewards.matching import last_number
from tests.rewards.doubles import answer


def scored(use: str, text: str, reference: Any, **params: Any) -> Any:
    return build(use, params)(answer(text, answer=reference))


@pytest.mark.parametrize(
    ("use", "text", "reference", "score"),
    [
        ("exact", " Paris\n", "Paris", 1),
        ("exact", "paris", "Paris", 0),
        ("contains", "It is Paris, of course", " Paris ", 1),
        ("contains", "It is Rome", "Paris", 0),
        ("number", "first 3, then 1,234.50", "1234.5", 1),
        ("number", "so -7", -7, 1),
        ("number", "so 7", "-7", 0),
        ("number", "no idea", "neither", 0),
        ("number", "It is $72.", "48/2 = 24, 48+24 = 72\n#### 72", 1),
    ],
)
def test_scores_at_the_borders(use: str, text: str, reference: Any, score: float) -> None:
    assert scored(use, text, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "number"), [("3.", 3.0), ("1,000,000", 1e6), ("1, 2", 2.0), ("", None), ("a 4.5 b", 4.5), ("$12,", 12.0)]
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("use", ["exact", "contains", "number"])
def test_slow_long_answers_are_scored_in_the_event_loop(use: str) -> None:
    """A rule of quadratic time would take minutes for 200,000 characters and block everything else."""
    reward = build(use, {})
    assert reward.inline
    for piece in ("1,", "1", "-", "1.", "A"):
        assert reward(answer(piece * (200_000 // len(piece)), answer="A")) in (0, 1)


def test_null_reference_fails_the_episode() -> None:
    with pytest.raises(EpisodeFailed, match=r"has null in the field 'answer'"):
        scored("exact", "None", None)


def test_reference_is_the_field_that_the_params_name() -> None:
    row = {"answer": "no", "target": "yes"}
    assert build("exact", {"answer_key": "target"})(answer("yes", **row)) == 1
    with pytest.raises(EpisodeFailed, match=r"has no field 'gold'; its fields are \['answer', 'target'\]") as caught:
        build("exact", {"answer_key": "gold"})(answer("yes", **row))
    assert caught.value.reason == "reward_error"
