"""Toy task that a tiny model which sees learns from random weights: the colour of squares, or their number."""

from __future__ import annotations

import io
import random

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question

COLOURS = {"r": (220, 30, 30), "g": (30, 180, 30), "b": (40, 60, 220), "y": (230, 220, 40)}
ASKS = {"colour": "c", "number": "n"}
"""What is asked, and the question's text."""
CELL, CELLS, MOST = 14, 4, 4
"""Pixels of a cell, which is a patch of Qwen's vision towers; cells in a row; squares in an image."""


class Squares:
    """Questions about an image of 1 to 4 squares of one colour in a grid. The answer is the first letter of the colour,
    or the number; the reward is 1 for exactly that."""

    size = None
    inline = True

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
        image = {"type": "image", "image": _drawn(cells, COLOURS[colour])}
        content = [image, {"type": "text", "text": self._text}]
        answer = colour if self._colour else str(count)
        return {"messages": [{"role": "user", "content": content}], "answer": answer}

    def score(self, answer: str, question: Question) -> float:
        """Return 1 for the right answer, 0 for any other."""
        return float(answer == question["answer"])

    def correct(self, reward: float) -> bool:
        """Return whether the answer is right."""
        return reward >= 1.0


def _drawn(cells: list[int], colour: tuple[int, int, int]) -> bytes:
    """Return a PNG file of a white image with a square in each of these cells."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for cell in cells:
        x, y = CELL * (cell % CELLS), CELL * (cell // CELLS)
        draw.rectangle((x + 2, y + 2, x + CELL - 3, y + CELL - 3), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
