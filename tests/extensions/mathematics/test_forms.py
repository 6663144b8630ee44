"""Answers compared by their form, at the borders of each rule, and in no more time than their length explains."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.mathematics.forms import last_boxed, normalised
from asyncrl.rewards import build
from tests.rewards.doubles import answer

WORDS = st.lists(st.sampled_from(["the", "a", "Paris", "paris,", "is", "lovely", "!", "An"]), max_size=6).map(" ".join)


def scored(use: str, text: str, reference: Any, **params: Any) -> Any:
    return build(use, params)(answer(text, answer=reference))


@pytest.mark.parametrize(
    ("use", "text", "reference", "score"),
    [
        ("fuzzy", "The Eiffel Tower!", "eiffel tower", 1),
        ("fuzzy", "tower", "eiffel tower", 2 / 3),
        ("fuzzy", "Rome", "Paris", 0),
        ("fuzzy", "the", "a!", 1),
        ("fuzzy", "the", "Paris", 0),
        ("boxed", r"so \boxed{ \frac{1}{2} } it is", r"\frac{1}{2}", 1),
        ("boxed", r"\boxed{1}, no: \boxed{2}", "2", 1),
        ("boxed", r"\boxed{1}, no: \boxed{2}", "1", 0),
        ("boxed", r"\boxed{7}", r"so \boxed{7}", 1),
        ("boxed", "2", "2", 0),
        ("choice", "C", "C", 1),
        ("choice", " (c).", "C", 0),
        ("choice", "**(B)**", "B", 1),
        ("choice", "B is tempting, but the answer is (C).", "C", 1),
        ("choice", "Answer: A. Wait. Answer: **D**", "(D)", 1),
        ("choice", "The correct option is B", "B", 1),
        ("choice", r"The answer is A, so \boxed{\text{B}}", "B", 1),
        ("choice", "The answer is Aberdeen", "A", 0),
        ("choice", "A B C D", "D", 0),
        ("choice", "The answer is (A) or (B)", "B", 0),
        ("choice", "The answer is J", "J", 1),
        ("choice", "The answer is C", 2, 1),
        ("choice", "The answer is C", "3", 0),
    ],
)
def test_scores_at_the_borders(use: str, text: str, reference: Any, score: float) -> None:
    assert scored(use, text, reference) == pytest.approx(score)


@given(WORDS, WORDS)
def test_fuzzy_is_symmetric_bounded_and_normalised(one: str, other: str) -> None:
    score = scored("fuzzy", one, other)
    assert 0 <= score <= 1
    assert score == scored("fuzzy", other, one)
    assert score == scored("fuzzy", f" The {one.upper()}.", other)
    assert scored("fuzzy", one, one) == 1
    assert (score == 1) == (sorted(normalised(one).split()) == sorted(normalised(other).split()))


@given(st.text(string.printable))
def test_normalising_again_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed {a}", "a"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"} } \boxed{1}", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        ("{1}", None),
        ("", None),
    ],
)
def test_last_box_that_is_closed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize("use", ["fuzzy", "boxed", "choice"])
def test_slow_long_answers_are_scored_in_the_event_loop(use: str) -> None:
    """A rule of quadratic time would take minutes for 200,000 characters and block everything else."""
    reward = build(use, {})
    assert reward.inline
    for piece in ("\\boxed{", "{", "answer is ", "answer" + " " * 50, "1,", "\\", "* ", "( "):
        assert reward(answer(piece * (200_000 // len(piece)), answer="A")) in (0, 1)
    assert reward(answer("answer is " + " " * 200_000 + "?", answer="B")) == 0


def test_format_is_a_regular_expression_that_crosses_lines() -> None:
    pattern = r"^<think>.*</think>[^<]*\Z"
    assert scored("format", "<think>\nlong\n</think>\n7", "", pattern=pattern) == 1
    assert scored("format", "7 <think></think>", "", pattern=pattern) == 0
    assert not build("format", {"pattern": "a"}).inline


@pytest.mark.parametrize("reference", ["K", "", "AB", 10, "maybe"])
def test_reference_that_is_no_choice_is_the_records_fault(reference: Any) -> None:
    with pytest.raises(EpisodeFailed, match="not one of the choices"):
        scored("choice", "The answer is A", reference)


@pytest.mark.parametrize(
    ("use", "params", "field"),
    [
        ("choice", {"options": 1}, "options"),
        ("choice", {"options": 27}, "options"),
        ("format", {"pattern": "("}, "pattern"),
    ],
)
def test_wrong_params_are_named(use: str, params: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(use, params)
    assert (caught.value.field, caught.value.value) == (f"reward.params.{field}", params[field])
