"""What the images show, the rules of the game, and that it can be won."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from asyncrl import tasks
from asyncrl.envs.env import Step
from asyncrl.errors import ConfigError
from asyncrl.extensions.squares.game import BLUE, RED, FindSquare
from asyncrl.extensions.squares.task import COLOURS
from asyncrl.tasks.build import build
from tests.fakes import tiny_config


def asked(ask: str) -> tasks.Task:
    return build(tiny_config(**{"task.kind": "squares", "task.params": {"ask": ask}}).task)


@pytest.mark.parametrize("ask", ["colour", "number"])
def test_answers_about_squares_are_what_the_image_shows(ask: str) -> None:
    task = asked(ask)
    for index in range(50):
        question = task.question(index)
        assert task.question(index) == question
        image = Image.open(io.BytesIO(question["messages"][0]["content"][0]["image"]))
        shown = [image.getpixel((14 * x + 7, 14 * y + 7)) for x in range(4) for y in range(4)]
        colours = [colour for colour in shown if colour != (255, 255, 255)]
        letter = next(name for name, colour in COLOURS.items() if colour == colours[0])
        assert question["answer"] == (letter if ask == "colour" else str(len(colours)))
        assert (task.score(question["answer"], question), task.score("x", question)) == (1.0, 0.0)
        assert task.correct(1.0)


def test_squares_are_asked_for_their_colour_or_number() -> None:
    with pytest.raises(ConfigError, match=r"task.params.ask: got 'size'. Must be one of \['colour', 'number'\]"):
        asked("size")


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
def test_non_move_ends_the_game_with_its_penalties(action: str) -> None:
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
