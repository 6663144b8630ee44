"""JSON files of a run: files of lines that one process appends and another follows, and files replaced atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError


def append(path: Path, record: dict[str, Any]) -> None:
    """Append an object as one line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def replace(path: Path, record: dict[str, Any]) -> None:
    """Replace the file atomically, so that a reader finds either the old content or the new."""
    replace_text(path, json.dumps(record, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file of any text in the same way. One process at a time may do so."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


class Tail:
    """Reader of the lines that were appended to a file since the last call. The file need not exist yet."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Create a reader. With `new`, it skips what the file already contains."""
        self._path, self._read = path, path.stat().st_size if new and path.exists() else 0

    def __call__(self) -> list[dict[str, Any]]:
        """Return the new complete lines. A last line that the writer has not completed is left for a later call. Raises
        RecordError for a line that is no object."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        start, self._read = self._read, self._read + len(whole) + len(end)
        return [self._record(line, start, number) for number, line in enumerate(whole.split(b"\n"), 1)] if end else []

    def _record(self, line: bytes, start: int, number: int) -> dict[str, Any]:
        try:
            if isinstance(record := json.loads(line), dict):
                return record
            problem = "it is no object"
        except ValueError as error:
            problem = str(error)
        where = f"line {number}" if not start else f"line {number} after byte {start}"
        raise RecordError(f"{self._path}: {where} is damaged ({problem}): repair the line, or delete it")
