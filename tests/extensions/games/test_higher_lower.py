"""The rules of the toy, and that it can be won."""

from __future__ import annotations

import pytest

from asyncrl.envs.env import Step
from asyncrl.extensions.games.higher_lower import HigherLower


def halve(game: HigherLower, secret: int) -> list[Step]:
    game.reset({"secret": secret})
    low, high, steps = 0, 9, list[Step]()
    while not steps or not steps[-1].done:
        guess = (low + high) // 2
        steps.append(game.step(str(guess)))
        low, high = (guess + 1, high) if steps[-1].messages == "1" else (low, guess - 1)
    return steps


def test_halving_finds_every_digit() -> None:
    for secret in range(10):
        steps = halve(HigherLower(), secret)
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]


def test_hints_are_true_and_states_are_what_is_left() -> None:
    game = HigherLower(turns=3)
    game.reset({"secret": 6})
    assert [game.step(guess) for guess in ("3", "8", "8")] == [
        Step("1", state="4-9"),
        Step("0", state="4-7"),
        Step("0", done=True, state="4-7"),  # the last turn
    ]


@pytest.mark.parametrize("action", ["", "12", " 1", "x", "²"])
def test_anything_but_a_digit_ends_the_game_with_its_penalty(action: str) -> None:
    game = HigherLower(invalid=-0.5)
    game.reset({"secret": 1})
    assert game.step(action) == Step(reward=-0.5, done=True)
    assert game.finish() == -0.5  # so is to be cut off


def test_secrets_are_functions_of_the_index_and_are_not_told() -> None:
    questions = [HigherLower().question(index) for index in range(200)]
    assert questions == [HigherLower().question(index) for index in range(200)]
    assert {question["secret"] for question in questions} == set(range(10))
    assert {question["messages"][0]["content"] for question in questions} == {" "}
