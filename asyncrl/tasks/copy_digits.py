"""Toy task that a 0.13M-parameter model learns from random weights: repeat the digits."""

from __future__ import annotations

import random

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question, Task


class CopyDigits(Task):
    """Reward: the fraction of correct positions, plus 1 when all are correct (a dense signal with a bonus for
    exactness)."""

    def __init__(self, config: TaskConfig) -> None:
        digits = config.params.get("digits")
        if not isinstance(digits, int) or not 1 <= digits <= 16:
            raise ConfigError("task.params.digits", digits, "Must be a number from 1 to 16.")
        self.digits = digits

    def question(self, index: int) -> Question:
        """Return `digits` random digits, the same for the same index."""
        generator = random.Random(index)
        digits = "".join(str(generator.randrange(10)) for _ in range(self.digits))
        return {"messages": [{"role": "user", "content": digits}], "answer": digits}

    def score(self, answer: str, question: Question) -> float:
        """Return a reward from 0 to 2."""
        expected = question["answer"]
        right = sum(a == b for a, b in zip(answer, expected, strict=False)) / self.digits
        return right + float(answer == expected)

    def correct(self, reward: float) -> bool:
        """Return whether the answer is all of the digits and nothing else."""
        return reward >= 2.0
