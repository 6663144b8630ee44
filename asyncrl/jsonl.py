"""JSON files of a run: lines that one process appends and another follows, and files that are replaced as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> None:
    """One object, one line, there for whoever follows the file."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def replace(path: Path, record: dict[str, Any]) -> None:
    """A reader finds the file as it was before or as it is now, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.rename(path)


class Tail:
    """The lines of a file that were appended since the last look; it need not be there yet."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """`new`: only what is appended from now on."""
        self._path, self._read = path, path.stat().st_size if new and path.exists() else 0

    def __call__(self) -> list[dict[str, Any]]:
        """Whole lines only: the writer may be in the middle of one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]
