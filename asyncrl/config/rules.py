"""Rules between settings, as the checks of this package state them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.settings import Choice, Section

Rule = tuple[str, bool, str] | tuple[str, Any, bool, str]
"""Field, whether its value breaks the rule, and the remedy. To show another value than the field's, it comes second."""


def require(section: Section, rules: Iterable[Rule], otherwise: str = "", *, prefix: str = "") -> None:
    """Raise ConfigError for the first rule that is broken. `otherwise` is appended to its remedy, and `prefix` goes
    before its field, which is one of `section`."""
    for field, *shown, broken, remedy in rules:
        if broken:
            value = shown[0] if shown else _value(section, field)
            raise ConfigError(f"{prefix}{field}", value, f"{remedy}{otherwise}")


def _value(section: Any, field: str) -> Any:
    for name in field.split("."):
        section = section.get(name) if isinstance(section, dict) else getattr(section, name)
    return section.name if isinstance(section, Choice) else section
