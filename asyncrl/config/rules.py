"""Rules between settings, as the checks of this package state them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl.errors import ConfigError

Rule = tuple[str, Any, bool, str]
"""Field, value, whether the value breaks the rule, and the remedy."""


def require(rules: Iterable[Rule], otherwise: str = "") -> None:
    """Raise ConfigError for the first rule that is broken. `otherwise` is appended to its remedy."""
    for field, value, broken, remedy in rules:
        if broken:
            raise ConfigError(field, value, f"{remedy}{otherwise}")
