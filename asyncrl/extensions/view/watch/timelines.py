"""Index of a run's timelines: which frame holds which group, and what each frame covers. Frames themselves are read
when they are shown, because the timelines of a long run do not fit into memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from asyncrl.extensions.recording.frames import FramePosition
from asyncrl.extensions.timelines import reader
from asyncrl.extensions.timelines.files import Record
from asyncrl.observability.timeline import ROLLOUT, BatchTimeline, GroupTimeline, ProcessSpan, PublishTimeline

RESTART = "restart"
"""Name of the launcher's spans for engines and routers that it starts again."""
KEPT_FRAMES = 64
"""Number of decoded frames in the cache."""
Place = tuple[str, FramePosition]
"""A process, and the position of one of its frames."""


class TimelineIndex:
    """Follows the timelines of all processes of a run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._after: dict[str, FramePosition] = {}
        self._groups: dict[str, Place] = {}
        self._covers: list[tuple[float, float, Place]] = []
        self._decoded: OrderedDict[Place, list[Record]] = OrderedDict()
        self.batches: dict[int, BatchTimeline] = {}
        self.publishes: dict[int, PublishTimeline] = {}
        self.restarts: list[ProcessSpan] = []

    def refresh(self) -> None:
        """Read the frames that were written since the last call. Raises RecordError on damage."""
        for process in reader.processes(self._run):
            for after, records in reader.read(self._run, process, self._after.get(process)):
                self._note((process, self._after.get(process, FramePosition(0, 0))), records)
                self._after[process] = after

    def groups(self, batch: BatchTimeline) -> list[GroupTimeline]:
        """Return the groups of a batch that have a timeline: not all have, if they are sampled."""
        wanted = set(batch.uids)
        places = dict.fromkeys(self._groups[uid] for uid in batch.uids if uid in self._groups)
        found = {
            record.uid: record
            for place in places
            for record in self._frame(place)
            if isinstance(record, GroupTimeline) and record.uid in wanted
        }
        return [found[uid] for uid in batch.uids if uid in found]

    def between(self, start: float, end: float) -> Iterator[Record]:
        """Yield the records of all processes that overlap a period."""
        for first, last, place in self._covers:
            if first < end and last > start:
                for record in self._frame(place):
                    times = _times(record)
                    if times and times[0] < end and times[1] > start:
                        yield record

    # -- internals -----------------------------------------------------------------------------------------

    def _note(self, place: Place, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, GroupTimeline) and place[0] == ROLLOUT:
                self._groups[record.uid] = place
            elif isinstance(record, BatchTimeline):
                self._forget_from(record.step)
                self.batches[record.step] = record
            elif isinstance(record, PublishTimeline):
                self.publishes[record.version] = record
            elif isinstance(record, ProcessSpan) and record.name == RESTART:
                self.restarts.append(record)
        times = [found for record in records if (found := _times(record))]
        if times:
            self._covers.append((min(start for start, _ in times), max(end for _, end in times), place))

    def _forget_from(self, step: int) -> None:
        """Forget batches that a resumed run takes again."""
        if self.batches and next(reversed(self.batches)) >= step:
            self.batches = {number: batch for number, batch in self.batches.items() if number < step}

    def _frame(self, place: Place) -> list[Record]:
        if place not in self._decoded:
            _, records = next(reader.read(self._run, *place))
            self._decoded[place] = records
            if len(self._decoded) > KEPT_FRAMES:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(place)
        return self._decoded[place]


def _times(record: Record) -> tuple[float, float] | None:
    """Return when something began and ended; None for records that are not drawn."""
    match record:
        case GroupTimeline():
            return record.admitted, record.ended
        case BatchTimeline():
            return record.asked, record.taken
        case PublishTimeline():
            return record.held, record.released
        case ProcessSpan():
            return record.start, record.end
        case _:
            return None
