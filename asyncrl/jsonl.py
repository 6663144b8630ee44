"""JSON files of a run: files of lines that one process appends and another follows, and files replaced atomically.

Whoever reads the run of somebody else uses `opened` and `read_object`: nothing that is there can make them wait or read
without end."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.errors import RecordError

MOST_BYTES = 16 << 20
"""Size of a file with one object, above which it is refused: settings and states are far smaller."""


def append(path: Path, *records: dict[str, Any]) -> None:
    """Append objects as one line each, together."""
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def replace(path: Path, record: dict[str, Any]) -> None:
    """Replace the file atomically, so that a reader finds either the old content or the new."""
    replace_text(path, json.dumps(record, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file of any text in the same way. One process at a time may do so."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def opened(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a file to read it, without ever waiting for it or touching a device. Raises RecordError if it is no regular
    file, or leads out of the folder `within`; OSError if it cannot be opened."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise RecordError(f"{path}: it is no regular file: remove it")
        link = f"/proc/self/fd/{found}"
        if within and within.resolve() not in Path(os.readlink(link)).parents:
            raise RecordError(f"{path}: it is a link out of {within}: remove it, or put a copy in its place")
        return open(link, "rb")
    finally:
        os.close(found)


def read_object(path: Path, within: Path | None = None) -> dict[str, Any] | None:
    """Return the object of a file; None if the file is missing, or empty because its writer has only begun. Raises
    RecordError if it holds anything else, or more than MOST_BYTES; and what `opened` raises."""
    try:
        with opened(path, within) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MOST_BYTES:
        raise RecordError(f"{path}: it holds more than {MOST_BYTES} bytes, so it is no file of asyncrl: remove it")
    return parsed(data, str(path), "repair the file, or delete it") if data else None


def parsed(data: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Return the object that is written there. Raises RecordError, with the place and the remedy, for anything else."""
    try:
        if isinstance(record := json.loads(data), dict):
            return record
        problem = "it is no object"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise RecordError(f"{where} is damaged ({problem}): {remedy}")


class Tail:
    """Reader of the lines that were appended to a file since the last call. The file need not exist yet."""

    def __init__(self, path: Path, *, new: bool = False, within: Path | None = None, most: int | None = None) -> None:
        """Create a reader. With `new`, it skips what the file already contains. A file that leads out of the folder
        `within`, or holds more than `most` bytes, is refused."""
        self._path, self._read = path, path.stat().st_size if new and path.exists() else 0
        self._within, self._most = within, most

    def __call__(self) -> list[dict[str, Any]]:
        """Return the new complete lines. A last line that the writer has not completed is left for a later call. Raises
        RecordError for a line that is no object, and what `opened` raises."""
        try:
            file = opened(self._path, self._within)
        except FileNotFoundError:
            return []
        with file:
            size = os.fstat(file.fileno()).st_size
            if self._most and size > self._most:
                raise RecordError(f"{self._path}: it has {size} bytes, and at most {self._most} are read")
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        start, self._read = self._read, self._read + len(whole) + len(end)
        return [self._record(line, start, number) for number, line in enumerate(whole.split(b"\n"), 1)] if end else []

    def _record(self, line: bytes, start: int, number: int) -> dict[str, Any]:
        where = f"line {number}" if not start else f"line {number} after byte {start}"
        return parsed(line, f"{self._path}: {where}", "repair the line, or delete it")
