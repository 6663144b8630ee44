"""Construction of the parameter dataclasses of algo/ from the configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from asyncrl.config import AlgoConfig

T = TypeVar("T")


def params_from_config(kind: type[T], algo: AlgoConfig) -> T:
    """Build a parameter dataclass, with each field taken from the setting of the same name."""
    names: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{one.name: getattr(algo, one.name) for one in names})
