"""From the configuration to the numbers that the pure functions of algo/ take."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from asyncrl.config import Algo

T = TypeVar("T")


def taken(kind: type[T], algo: Algo) -> T:
    """A dataclass of numbers, each from the setting of its name."""
    names: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{one.name: getattr(algo, one.name) for one in names})
