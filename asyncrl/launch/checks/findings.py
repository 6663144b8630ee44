"""Results of the preflight: one line each, with a remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncRLError, ConfigError

WIDTH = 120
LABEL, FIELD = 8, 26
"""Column widths."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Literal["ok", "warning", "error"]
    """error: the run would fail; warning: it may."""
    field: str
    """The setting concerned, or a word for what is not a setting."""
    value: str
    """What was found."""
    remedy: str = ""

    def lines(self) -> str:
        """Return the finding as wrapped text."""
        indent = " " * (LABEL + FIELD + 2)
        text = _filled(self.value, f"{self.level:{LABEL}} {self.field:{FIELD}} ", indent)
        return text + ("\n" + _filled(self.remedy, indent + "-> ", indent) if self.remedy else "")


def _filled(text: str, first: str, later: str) -> str:
    """Wrap text. Paths are kept whole, so that they can be copied."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )


def ok(field: str, value: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding("ok", field, value)


def warning(field: str, value: str, remedy: str) -> Finding:
    """Return the finding of a problem that may fail the run, or slow it down."""
    return Finding("warning", field, value, remedy)


def error(field: str, value: str, remedy: str) -> Finding:
    """Return the finding of a problem that would fail the run."""
    return Finding("error", field, value, remedy)


def refused(check: Callable[[], object], field: str) -> list[Finding]:
    """Run a check that raises, and return its error as a finding. An error without a field is attributed to `field`."""
    try:
        check()
    except ConfigError as problem:
        return [error(problem.field, str(problem.value), problem.remedy)]
    except AsyncRLError as problem:
        return [error(field, str(problem), "See the message.")]
    return []


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether the run would fail."""
    return any(one.level == "error" for one in findings)


def rendered(findings: Sequence[Finding]) -> str:
    """Return all findings as text, errors last, followed by their counts."""
    counts = {level: sum(one.level == level for one in findings) for level in ("error", "warning", "ok")}
    total = f"preflight: {counts['error']} error(s), {counts['warning']} warning(s), {counts['ok']} ok"
    ordered = sorted(findings, key=lambda one: ["ok", "warning", "error"].index(one.level))
    return "\n".join([*(one.lines() for one in ordered), total])
