"""What this folder adds: the task `squares`."""

from __future__ import annotations

from asyncrl import extension


class Squares(extension.Extension):
    """Images that tiny models learn to read."""

    tasks = {"squares": "asyncrl.extensions.squares.task:ImagesOfSquares"}  # noqa: RUF012


Own = Squares
