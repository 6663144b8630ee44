"""A recording, read: its events in order, its batches by step, its groups by uid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import RecordError
from asyncrl.records import events, frames
from asyncrl.records.events import Committed, Event, Rejected, Taken, unpacked
from asyncrl.records.frames import Frames, Place
from asyncrl.records.index import Line, usable
from asyncrl.types import Batch, Group

RECORDS = "records"
"""The recording's folder, in the folder of its run."""
KEPT_FRAMES = 64
"""Decoded frames that are remembered: a batch's groups lie near each other."""


def folder_of(run: Path) -> Path:
    """The recording of a run, or the folder itself."""
    inner = run / RECORDS
    return inner if inner.is_dir() else run


class Recording:
    """Opened at once: frames that the index knows are not read for it. Raises RecordError when there is none."""

    def __init__(self, run: Path) -> None:
        self.folder = folder_of(run)
        if not self.folder.is_dir() or not frames.files(self.folder):
            raise RecordError(f"{run} holds no recording: was it made with record=true?")
        self.torn = 0
        """Bytes at the end that were being written when the run was killed, and are left out."""
        self._groups: dict[str, Place] = {}
        self._steps: dict[int, Place] = {}
        self._kept: OrderedDict[Place, list[Event]] = OrderedDict()
        self._open()

    @property
    def steps(self) -> list[int]:
        """Of the batches that it holds, ascending."""
        return sorted(self._steps)

    @property
    def uids(self) -> list[str]:
        """Of the groups that it holds, in the order of their end."""
        return list(self._groups)

    def events(self) -> Iterator[Event]:
        """All of them, in order. Raises RecordError at damage."""
        for frame in Frames(self.folder):
            yield from events.decode(frame.data)

    def group(self, uid: str) -> Group:
        """The group as it was handed in. Raises RecordError when it is not there."""
        if uid not in self._groups:
            raise RecordError(f"{self.folder} holds no group {uid}")
        for event in self._frame(self._groups[uid]):
            if isinstance(event, Committed | Rejected) and event.group and event.group.uid == uid:
                return unpacked(event.group)
        raise RecordError(f"{self.folder}: the index is wrong about group {uid}: delete index.jsonl")

    def batch(self, step: int) -> Batch:
        """The batch of a step, as the trainer got it. Raises RecordError when it is not there."""
        if step not in self._steps:
            held = f"{self.steps[0]} to {self.steps[-1]}" if self._steps else "none"
            raise RecordError(f"{self.folder} holds no batch {step}, but {held}")
        for event in self._frame(self._steps[step]):
            if isinstance(event, Taken) and event.step == step:
                return Batch(step, [self.group(uid) for uid in event.uids], event.figures)
        raise RecordError(f"{self.folder}: the index is wrong about batch {step}: delete index.jsonl")

    # -- within --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        lines = usable(self.folder)
        for line in lines:
            self._note(line)
        rest = Frames(self.folder, lines[-1].after if lines else None)
        for frame in rest:
            self._note(Line.of(frame.place, frame.end, events.decode(frame.data)))
        self.torn = rest.torn

    def _note(self, line: Line) -> None:
        """A later group or batch of the same name takes the place of the one before: that was rolled back."""
        self._groups |= dict.fromkeys(line.groups, line.place)
        self._steps |= dict.fromkeys(line.steps, line.place)

    def _frame(self, place: Place) -> list[Event]:
        if place not in self._kept:
            self._kept[place] = events.decode(frames.read(self.folder, place).data)
            if len(self._kept) > KEPT_FRAMES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]
