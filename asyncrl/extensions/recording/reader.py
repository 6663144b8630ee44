"""Reader of a recording: its events in order, its batches by step, its groups by uid."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import events, frames, images
from asyncrl.extensions.recording.events import Committed, Event, PackedGroup, Rejected, unpacked
from asyncrl.extensions.recording.frames import FramePosition, Frames
from asyncrl.extensions.recording.index import IndexEntry, usable
from asyncrl.extensions.recording.writer import RECORDS
from asyncrl.images import image_name
from asyncrl.jsonl import opened
from asyncrl.rollout.events import Began, Saved, Taken
from asyncrl.schema import Batch, Group

KEPT_FRAMES = 64
"""Number of decoded frames in the cache: the groups of a batch are close to each other."""
_NAME = re.compile("[0-9a-f]{64}")


def folder_of(run: Path) -> Path:
    """Return the recording's folder in a run folder, or the folder itself."""
    inner = run / RECORDS
    return inner if inner.is_dir() else run


class Recording:
    """A recording. It opens fast, because frames that the index knows are not read. Raises RecordError when there is
    none."""

    def __init__(self, run: Path) -> None:
        self.folder = folder_of(run)
        if not self.folder.is_dir() or not frames.files(self.folder):
            raise RecordError(f"{run} holds no recording: was it made with record=true?")
        self.torn = 0
        """Bytes at the end that were being written when the run was killed, and are skipped."""
        self.began = 0
        """Number of times that the run was started or resumed."""
        self.after: FramePosition | None = None
        """Where the next frame will begin."""
        self._groups: dict[str, FramePosition] = {}
        self._steps: dict[int, FramePosition] = {}
        self._decoded: OrderedDict[FramePosition, list[Event]] = OrderedDict()
        self._open()

    @property
    def steps(self) -> list[int]:
        """Steps of its batches, ascending."""
        return sorted(self._steps)

    @property
    def uids(self) -> list[str]:
        """Uids of its groups, in the order in which they ended."""
        return list(self._groups)

    def events(self) -> Iterator[Event]:
        """Yield the events in order, as if the run had never been interrupted: those that were rolled back are left out
        (`kept`). Raises RecordError on damage."""
        if self.began <= 1:
            yield from self.all_events()
            return
        stretches = kept(self.all_events())
        for number, event in enumerate(self.all_events()):
            if any(start <= number < end for start, end in stretches):
                yield event

    def all_events(self) -> Iterator[Event]:
        """Yield all events, including those that were rolled back."""
        for frame in Frames(self.folder):
            yield from events.decode(frame.data)

    def group(self, uid: str) -> Group:
        """Return the group as it was handed in. Raises RecordError if it is missing."""
        if uid not in self._groups:
            raise RecordError(f"{self.folder} holds no group {uid}")
        for event in reversed(self._frame(self._groups[uid])):
            if isinstance(event, Committed | Rejected) and event.group and event.group.uid == uid:
                return self.whole(event.group)
        raise RecordError(f"{self.folder}: the index is wrong about group {uid}: delete index.jsonl")

    def whole(self, group: PackedGroup) -> Group:
        """Return a group of an event with its images. Raises RecordError if one is missing."""
        return unpacked(group, images_of(self.folder, group.images))

    def batch(self, step: int) -> Batch:
        """Return the batch of a step as the trainer received it. Raises RecordError if it is missing."""
        if step not in self._steps:
            held = f"{self.steps[0]} to {self.steps[-1]}" if self._steps else "none"
            raise RecordError(f"{self.folder} holds no batch {step}, but {held}")
        for event in reversed(self._frame(self._steps[step])):
            if isinstance(event, Taken) and event.step == step:
                return Batch(step, [self.group(uid) for uid in event.uids], event.figures)
        raise RecordError(f"{self.folder}: the index is wrong about batch {step}: delete index.jsonl")

    # -- internals -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        lines = usable(self.folder)
        for line in lines:
            self._note(line)
        self.after = lines[-1].after if lines else None
        self._read_on()
        if self.began > 1:
            self._leave_out_what_was_rolled_back()

    def _read_on(self) -> None:
        rest = Frames(self.folder, self.after)
        for frame in rest:
            self._note(IndexEntry.of(frame.place, frame.end, events.decode(frame.data)))
            self.after = FramePosition(frame.place.file, frame.end)
        self.torn = rest.torn

    def _note(self, line: IndexEntry) -> None:
        """Add an index entry; a later group or batch of the same name replaces the earlier one."""
        self._groups |= dict.fromkeys(line.groups, line.place)
        self._steps |= dict.fromkeys(line.steps, line.place)
        self.began += line.began

    def _leave_out_what_was_rolled_back(self) -> None:
        lines = [IndexEntry.of(FramePosition(0, 0), 0, [event]) for event in self.events()]
        groups = {uid for line in lines for uid in line.groups}
        steps = {step for line in lines for step in line.steps}
        self._groups = {uid: place for uid, place in self._groups.items() if uid in groups}
        self._steps = {step: place for step, place in self._steps.items() if step in steps}

    def _frame(self, place: FramePosition) -> list[Event]:
        if place not in self._decoded:
            self._decoded[place] = events.decode(frames.read(self.folder, place).data)
            if len(self._decoded) > KEPT_FRAMES:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(place)
        return self._decoded[place]


def kept(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of event numbers that belong to the run. The others were rolled back by a resume.

    A run resumed at version v continues after the last preceding `saved` of v, and of the same number; a run that
    started from scratch continues nothing.

        began 0 . . . saved 4 . . . . . saved 8 . . . |killed| began 4 . . . saved 8 . . .
        [---------------------]                        [--------------------------------]   kept
    """
    stretches: list[tuple[int, int]] = []
    saved: dict[tuple[int, int], int] = {}
    count = 0
    for number, event in enumerate(events):
        count = number + 1
        if isinstance(event, Saved):
            saved[event.version, event.number] = count
        elif isinstance(event, Began):
            if stretches:
                stretches[-1] = stretches[-1][0], number
            scratch = event.version == event.number == 0
            end = 0 if scratch else saved.get((event.version, event.number), 0)
            stretches = [(first, min(last, end)) for first, last in stretches if first < end]
            stretches.append((number, number))
        elif not stretches:
            stretches.append((number, number))
    if stretches:
        stretches[-1] = stretches[-1][0], count
    return stretches


def images_of(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the images with these names. Raises RecordError if one is missing or damaged."""
    found = {}
    for name in names:
        path = folder / images.FOLDER / f"{name}.png"
        if not _NAME.fullmatch(name):
            raise RecordError(f"{folder} names an image {name!r:.80}, which is not the SHA-256 of a file")
        try:
            with opened(path, folder) as file:
                found[name] = file.read()
        except OSError as error:
            raise RecordError(f"the image {path} of the recording cannot be read: {error.strerror}") from None
        if image_name(found[name]) != name:
            raise RecordError(f"the image {path} of the recording is damaged: its content has another SHA-256")
    return found
