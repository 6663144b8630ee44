"""Index of a recording: one line of JSON per frame with its contents, so that they are found without reading all
frames.

It is only an optimization: frames that are missing from it, or listed wrongly, are read instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.events import Committed, Event, Rejected, Scored
from asyncrl.extensions.recording.frames import FramePosition
from asyncrl.jsonl import opened
from asyncrl.rollout.events import Began, Published, Taken


class IndexEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index entry of one frame."""

    file: int
    offset: int
    end: int
    groups: list[str] = []  # uids of the groups that it holds
    steps: list[int] = []  # steps of its batches
    versions: list[int] = []  # versions published in it
    began: int = 0  # number of starts and resumes in it

    @classmethod
    def of(cls, place: FramePosition, end: int, held: Sequence[Event]) -> IndexEntry:
        """Build the entry of a frame from its events."""
        groups = [e.group.uid for e in held if isinstance(e, Committed | Rejected) and e.group]
        steps = [event.step for event in held if isinstance(event, Taken | Scored)]
        versions = [event.version for event in held if isinstance(event, Published)]
        began = sum(isinstance(event, Began) for event in held)
        return cls(place.file, place.offset, end, groups, steps, versions, began)

    @property
    def place(self) -> FramePosition:
        """Position of the frame."""
        return FramePosition(self.file, self.offset)

    @property
    def after(self) -> FramePosition:
        """Position of the next frame, if it is in the same file."""
        return FramePosition(self.file, self.end)


def index_path(folder: Path) -> Path:
    """Return the path of the index, next to the frames."""
    return folder / "index.jsonl"


def _read(folder: Path) -> list[IndexEntry]:
    """Return the lines that are consistent with each other, up to the first that is not."""
    lines: list[IndexEntry] = []
    try:
        with opened(index_path(folder), folder) as file:
            data = file.read()
    except FileNotFoundError:
        return lines
    for raw in data.splitlines():
        try:
            line = msgspec.json.decode(raw, type=IndexEntry)
        except (msgspec.DecodeError, ValueError):
            break
        follows = not lines or line.file > lines[-1].file or (line.file, line.offset) == (lines[-1].file, lines[-1].end)
        if not follows:
            break
        lines.append(line)
    return lines


def usable(folder: Path) -> list[IndexEntry]:
    """Return the lines of the index, up to the last whose frame is where it says."""
    lines = _read(folder)
    while lines and not _fits(folder, lines[-1]):
        lines.pop()
    return lines


def _fits(folder: Path, line: IndexEntry) -> bool:
    try:
        return frames.read(folder, line.place).end == line.end
    except RecordError:
        return False
