"""Files of the run folder in which the rollout process reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import jsonl


class Notes:
    """Writes the report files of one run; `version` returns the version that the engines serve."""

    def __init__(self, run_dir: Path, version: Callable[[], int] = lambda: 0) -> None:
        self._run_dir, self._version = run_dir, version

    def warn(self, text: str, traceback: str | None = None) -> None:
        """Append a line to warnings.jsonl."""
        line = {"version": self._version(), "warning": text, **({"traceback": traceback} if traceback else {})}
        jsonl.append(self._run_dir / "warnings.jsonl", line)

    def publish(self, ledger: dict[str, Any], warnings: list[str]) -> None:
        """Replace ledger.json, at every version, and append the warnings to warnings.jsonl."""
        jsonl.replace(self._run_dir / "ledger.json", ledger)
        for text in warnings:
            self.warn(text)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Append a line to eval.jsonl."""
        jsonl.append(self._run_dir / "eval.jsonl", line)

    def compared(self, line: dict[str, Any]) -> None:
        """Append a line to compare.jsonl."""
        jsonl.append(self._run_dir / "compare.jsonl", line)
