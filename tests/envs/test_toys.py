"""The toys' rules, and that they can be won."""

from __future__ import annotations

import pytest

from asyncrl.envs.env import Step
from asyncrl.envs.toys import HigherLower, Nim, nim_expert


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


def test_secrets_and_piles_are_functions_of_the_index_and_are_not_told() -> None:
    questions = [HigherLower().question(index) for index in range(200)]
    assert questions == [HigherLower().question(index) for index in range(200)]
    assert {question["secret"] for question in questions} == set(range(10))
    assert {question["messages"][0]["content"] for question in questions} == {" "}
    assert {Nim().question(index)["role"] for index in range(50)} == {"player-0"}
    assert {Nim().question(index)["messages"][0]["content"] for index in range(50)} == {"5", "6", "7", "9"}


def test_nim_is_won_by_who_takes_the_last() -> None:
    game = Nim()
    game.reset({"pile": 6})
    assert [game.step(move) for move in ("2", "3", "1")] == [
        Step("4", role="player-1", state="4"),
        Step("1", role="player-0", state="1"),
        Step(rewards={"player-0": 1.0, "player-1": -1.0}, done=True),
    ]


@pytest.mark.parametrize("move", ["0", "4", "3", "", "11", "x"])
def test_move_that_is_none_costs_who_made_it_alone(move: str) -> None:
    game = Nim(invalid=-0.5)
    game.reset({"pile": 3})
    game.step("1")
    assert game.step(move) == Step(rewards={"player-1": -0.5}, done=True)


@pytest.mark.parametrize("pile", Nim.PILES)
def test_who_begins_can_win_from_every_pile_that_is_dealt(pile: int) -> None:
    """Against any play: the expert leaves a multiple of 4."""

    def wins(left: int) -> bool:
        taken = int(nim_expert([{"role": "user", "content": str(left)}]))
        left -= taken
        return not left or (left > 3 and all(wins(left - move) for move in (1, 2, 3)))

    assert wins(pile)
