"""The rules of the toys, and that they can be won."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from asyncrl.envs.env import Step
from asyncrl.envs.toys import BLUE, RED, FindSquare, HigherLower


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


def pixels(step: Step) -> Image.Image:
    (message,) = step.messages
    return Image.open(io.BytesIO(message["content"][0]["image"]))  # type: ignore[index]


def test_every_move_shows_where_the_square_is_and_arriving_wins() -> None:
    game = FindSquare(turns=4)
    game.reset({"places": [0, 6]})  # the goal is two to the right, and one down
    moves = [game.step(action) for action in ("u", "l", "r", "d")]
    assert [step.state for step in moves] == ["0", "0", "1", "5"]
    assert [step.done for step in moves] == [False, False, False, True]
    image = pixels(moves[-1])
    assert (image.getpixel((21, 21)), image.getpixel((35, 21))) == (BLUE, RED)
    game.reset({"places": [5, 6]})
    assert (game.step("r").reward, game.step("l").reward) == (1.0, 0.0)


@pytest.mark.parametrize("action", ["", "rr", " r", "x"])
def test_anything_but_a_move_ends_the_game_with_a_penalty_for_each_turn_that_is_left(action: str) -> None:
    game = FindSquare(turns=4, invalid=-0.5)
    game.reset({"places": [0, 6]})
    assert not game.step("r").done
    assert game.finish() == -1.5  # cut off in its second turn
    assert game.step(action) == Step(reward=-1.0, done=True)


def test_grids_are_functions_of_the_index() -> None:
    questions = [FindSquare().question(index) for index in range(100)]
    assert questions == [FindSquare().question(index) for index in range(100)]
    assert all(one["places"][0] != one["places"][1] for one in questions)
    assert len({tuple(one["places"]) for one in questions}) > 50
