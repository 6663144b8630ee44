"""Games for tests: one that records which episodes its processes began, and starts a program of its own, as many
environments do, and one with an image in every turn."""

from __future__ import annotations

import os
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from asyncrl.envs.env import Question, Step
from asyncrl.extensions.squares.game import FindSquare

TURNS = 3


class Noted:
    """Game of copying digits; each digit follows from the last one and its answer.

    Each episode is a line in a file of its process.
    """

    def __init__(self, *, folder: str, seconds: float = 0.0) -> None:
        """Configure the game.

        `folder` holds the files; a step takes `seconds`, so that at most times some episode is in progress.
        """
        self._folder, self._seconds = Path(folder), seconds
        self._program: subprocess.Popen[bytes] | None = None

    def question(self, index: int) -> Question:
        """Return a question that contains the first digit."""
        digit = random.Random(index).randrange(10)
        return {"messages": [{"role": "user", "content": str(digit)}], "digit": digit, "seed": index}

    def reset(self, question: Question) -> None:
        """Record the episode and start it."""
        self._digit, self._left = question["digit"], TURNS
        self._program = subprocess.Popen(["sleep", "600"])
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write(f"{question['seed']}\n")

    def step(self, action: str) -> Step:
        """Make a step, which takes time."""
        time.sleep(self._seconds)
        right = action[:1] == str(self._digit)
        self._digit, self._left = (self._digit + len(action)) % 10, self._left - 1
        return Step(str(self._digit), reward=float(right), done=not self._left)

    def close(self) -> None:
        """Close the environment and its program."""
        if self._program:
            self._program.kill()
            self._program.wait()


class Wandering(FindSquare):
    """FindSquare in which every text is a move and has a reward, so that a model that has learnt nothing yet sees many
    images, and its answers decide what it learns."""

    def step(self, action: str) -> Step:
        """Move by what the text adds up to, and show the grid."""
        number = sum(map(ord, action))
        return replace(super().step("lrud"[number % 4]), reward=number % 5 / 5)
