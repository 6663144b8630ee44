"""A game in images, which a tiny model that sees learns from random weights. Each move is one character."""

from __future__ import annotations

import random

from asyncrl.envs.env import Question, Step
from asyncrl.extensions.squares.drawing import squares
from asyncrl.schema import Message

MOVES = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
BLUE, RED = (40, 60, 220), (220, 30, 30)


class FindSquare:
    """Game of moving a blue square (l, r, u, d) onto a red one in `turns` moves; every turn shows a new image of the
    grid. The reward is 1 for arriving. Anything but a move ends the game, and costs `invalid` for each turn that is
    left, so that every valid move is worth something; moves out of the grid leave the square where it is."""

    inline = True
    COLUMNS = 4

    def __init__(self, *, turns: int = 6, invalid: float = -0.1) -> None:
        self._turns, self._invalid = turns, invalid

    def question(self, index: int) -> Question:
        """Return the question of an index, from which both places follow."""
        here, goal = random.Random(index).sample(range(self.COLUMNS**2), 2)
        message = self._message(here, goal)
        return {"messages": [message], "places": [here, goal], "seed": index, "state": str(here)}

    def reset(self, question: Question) -> None:
        """Start the game. Returns no messages: the question shows the grid."""
        (self._here, self._goal), self._left = question["places"], self._turns

    def finish(self) -> float:
        """Return the reward of an abandoned game: the turn of a truncated move is lost as well."""
        return self._invalid * self._left

    def step(self, action: str) -> Step:
        """Move, and show the grid."""
        self._left -= 1
        if action not in MOVES:
            return Step(reward=self._invalid * self._left, done=True)
        across, down = MOVES[action]
        x, y = self._here % self.COLUMNS + across, self._here // self.COLUMNS + down
        if x in range(self.COLUMNS) and y in range(self.COLUMNS):
            self._here = y * self.COLUMNS + x
        found = self._here == self._goal
        message = self._message(self._here, self._goal)
        return Step([message], reward=float(found), done=found or not self._left, state=str(self._here))

    def _message(self, here: int, goal: int) -> Message:
        image = squares({goal: RED, here: BLUE}, self.COLUMNS)
        return {"role": "user", "content": [{"type": "image", "image": image}]}
