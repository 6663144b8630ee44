"""What the rollout process tells whoever reads its run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import jsonl


class Notes:
    """Files of one run; `version` says which the engines serve."""

    def __init__(self, run_dir: Path, version: Callable[[], int] = lambda: 0) -> None:
        self._run_dir, self._version = run_dir, version

    def warn(self, text: str, traceback: str | None = None) -> None:
        """A line of warnings.jsonl."""
        line = {"version": self._version(), "warning": text, **({"traceback": traceback} if traceback else {})}
        jsonl.append(self._run_dir / "warnings.jsonl", line)

    def publish(self, ledger: dict[str, Any], warnings: list[str]) -> None:
        """ledger.json, at every version, and what must be told then."""
        jsonl.replace(self._run_dir / "ledger.json", ledger)
        for text in warnings:
            self.warn(text)

    def evaluated(self, line: dict[str, Any]) -> None:
        """A line of eval.jsonl."""
        jsonl.append(self._run_dir / "eval.jsonl", line)

    def compared(self, line: dict[str, Any]) -> None:
        """A line of compare.jsonl."""
        jsonl.append(self._run_dir / "compare.jsonl", line)
