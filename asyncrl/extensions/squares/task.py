"""Toy task that a tiny model which sees learns from random weights: the colour of squares, or their number."""

from __future__ import annotations

import random

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.extensions.squares.drawing import squares
from asyncrl.tasks import Question, Task

COLOURS = {"r": (220, 30, 30), "g": (30, 180, 30), "b": (40, 60, 220), "y": (230, 220, 40)}
ASKS = {"colour": "c", "number": "n"}
"""What is asked, and the question's text."""
CELLS, MOST = 4, 4
"""Cells in a row, each of which is a patch of Qwen's vision towers; squares in an image."""


class ImagesOfSquares(Task):
    """Questions about an image of 1 to 4 squares of one colour in a grid. The answer is the first letter of the colour,
    or the number; the reward is 1 for exactly that."""

    def __init__(self, config: TaskConfig) -> None:
        ask = config.params.get("ask")
        if ask not in ASKS:
            raise ConfigError("task.params.ask", ask, f"Must be one of {sorted(ASKS)}.")
        self._colour, self._text = ask == "colour", ASKS[ask]

    def question(self, index: int) -> Question:
        """Draw an image, the same for the same index."""
        generator = random.Random(index)
        count, colour = generator.randint(1, MOST), generator.choice(sorted(COLOURS))
        cells = generator.sample(range(CELLS * CELLS), count)
        image = {"type": "image", "image": squares(dict.fromkeys(cells, COLOURS[colour]), CELLS)}
        content = [image, {"type": "text", "text": self._text}]
        answer = colour if self._colour else str(count)
        return {"messages": [{"role": "user", "content": content}], "answer": answer}

    def score(self, answer: str, question: Question) -> float:
        """Return 1 for the right answer, 0 for any other."""
        return float(answer == question["answer"])
