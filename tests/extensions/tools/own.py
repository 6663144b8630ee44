"""A user's own tools."""

from __future__ import annotations

from typing import Any, ClassVar


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


def broken(*x: int) -> int:
    return sum(x)


class Counter:
    """Counts its own calls."""

    name, description = "count", "Counts."
    parameters: ClassVar[dict[str, Any]] = {"type": "object"}

    def __init__(self, start: int = 0) -> None:
        self._count = start

    async def call(self, arguments: dict[str, Any]) -> str:
        self._count += 1
        return str(self._count)


class Nothing:
    """Is no tool."""


class Echo(Counter):
    name = "echo"


COUNTER = Counter(100)
NOTHING = Nothing()
