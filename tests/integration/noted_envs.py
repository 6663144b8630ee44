"""A game that tells which episodes its processes began, and has a program of its own, as many environments do."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

from asyncrl.envs.env import Question, Step

TURNS = 3


class Noted:
    """Copy a digit; the next one follows from it and from what was answered. Each episode is a line in a file of its
    process."""

    def __init__(self, *, folder: str, seconds: float = 0.0) -> None:
        """`folder` of these files; `seconds` that a step takes, so that at most moments some episode is under way."""
        self._folder, self._seconds = Path(folder), seconds
        self._program: subprocess.Popen[bytes] | None = None

    def question(self, index: int) -> Question:
        """The first digit."""
        digit = random.Random(index).randrange(10)
        return {"messages": [{"role": "user", "content": str(digit)}], "digit": digit, "seed": index}

    def reset(self, question: Question) -> None:
        """Noted."""
        self._digit, self._left = question["digit"], TURNS
        self._program = subprocess.Popen(["sleep", "600"])
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write(f"{question['seed']}\n")

    def step(self, action: str) -> Step:
        """In its time."""
        time.sleep(self._seconds)
        right = action[:1] == str(self._digit)
        self._digit, self._left = (self._digit + len(action)) % 10, self._left - 1
        return Step(str(self._digit), reward=float(right), done=not self._left)

    def close(self) -> None:
        """With its program."""
        if self._program:
            self._program.kill()
            self._program.wait()
