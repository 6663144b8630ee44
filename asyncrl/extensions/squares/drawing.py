"""Images of squares in a grid, for tasks and games that small models learn."""

from __future__ import annotations

import io
from collections.abc import Mapping

Colour = tuple[int, int, int]
SIDE = 14
"""Pixels of a cell: those of a patch of the vision towers."""


def squares(cells: Mapping[int, Colour], columns: int) -> bytes:
    """Return a PNG file of a white grid of `columns` times as many cells of SIDE pixels, with a square of this colour
    in each of these cells, which are counted row by row."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * columns, SIDE * columns), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for cell, colour in cells.items():
        x, y = SIDE * (cell % columns), SIDE * (cell // columns)
        draw.rectangle((x + 2, y + 2, x + SIDE - 3, y + SIDE - 3), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
