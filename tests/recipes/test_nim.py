"""The rules of Nim, and that it can be won."""

from __future__ import annotations

import pytest

from asyncrl.envs.env import Step
from asyncrl_recipes.self_play.nim import Nim, nim_expert


def test_piles_are_functions_of_the_index() -> None:
    questions = [Nim().question(index) for index in range(50)]
    assert questions == [Nim().question(index) for index in range(50)]
    assert {question["role"] for question in questions} == {"player-0"}
    assert {question["messages"][0]["content"] for question in questions} == {"5", "6", "7", "9"}


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
