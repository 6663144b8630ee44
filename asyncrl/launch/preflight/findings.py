"""What was found: one line each, and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncRLError, ConfigError

WIDTH = 120
LABEL, FIELD = 8, 26
"""Widths of the columns."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warning", "error"]
    """error: the run would fail; warning: it may."""
    field: str
    """The setting that it is about, or a word for what is no setting."""
    value: str
    """What was found."""
    remedy: str = ""

    def lines(self) -> str:
        """For people to read."""
        indent = " " * (LABEL + FIELD + 2)
        text = _filled(self.value, f"{self.level:{LABEL}} {self.field:{FIELD}} ", indent)
        return text + ("\n" + _filled(self.remedy, indent + "-> ", indent) if self.remedy else "")


def _filled(text: str, first: str, later: str) -> str:
    """Paths stay whole: they are copied."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )


def ok(field: str, value: str) -> Finding:
    """As it must be."""
    return Finding("ok", field, value)


def warning(field: str, value: str, remedy: str) -> Finding:
    """The run may fail of it, or be slow."""
    return Finding("warning", field, value, remedy)


def error(field: str, value: str, remedy: str) -> Finding:
    """The run would fail of it."""
    return Finding("error", field, value, remedy)


def refused(check: Callable[[], object], field: str) -> list[Finding]:
    """A check that raises, as findings; an error that names no field is about `field`."""
    try:
        check()
    except ConfigError as problem:
        return [error(problem.field, str(problem.value), problem.remedy)]
    except AsyncRLError as problem:
        return [error(field, str(problem), "See the message.")]
    return []


def failed(findings: Sequence[Finding]) -> bool:
    """Whether the run would fail."""
    return any(one.level == "error" for one in findings)


def rendered(findings: Sequence[Finding]) -> str:
    """All of them, and their numbers."""
    counts = {level: sum(one.level == level for one in findings) for level in ("error", "warning", "ok")}
    total = f"preflight: {counts['error']} error(s), {counts['warning']} warning(s), {counts['ok']} ok"
    return "\n".join([*(one.lines() for one in findings), total])
