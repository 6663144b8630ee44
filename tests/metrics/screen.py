"""A console that prints into a text, and records of steps for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import rich.console

from asyncrl.metrics.console import Console
from asyncrl.metrics.fields import STEP
from tests.fakes import tiny_config


class Screen:
    """A console that prints into a text."""

    def __init__(self, run_dir: Path, *, terminal: str = "", **changes: Any) -> None:
        """`terminal` is its type (TERM); without one, the output is none."""
        self.out = io.StringIO()
        plain = rich.console.Console(
            file=self.out,
            highlight=False,
            width=100 if terminal else 80,
            force_terminal=bool(terminal),
            _environ={"TERM": terminal},
        )
        self.now = 0.0
        self.console = Console(tiny_config(**changes), run_dir, plain, clock=lambda: self.now)

    def text(self) -> str:
        found = self.out.getvalue()
        self.out.truncate(0)
        self.out.seek(0)
        return found


def record(step: int, **changes: float) -> str:
    values = {**dict.fromkeys(STEP, 0.5), "step": step, "staleness/max": 2, "step/bad": 0.0, "samples/generated": 64}
    return json.dumps({**values, "time/step": 2.0, "time/since_start": 30.0 + 2 * step, **changes}) + "\n"


def append(file: Path, text: str) -> None:
    with file.open("a") as out:
        out.write(text)


def lacks(text: str, *values: str) -> list[str]:
    """Return those of the values that a text does not show."""
    return [value for value in values if value not in text]
