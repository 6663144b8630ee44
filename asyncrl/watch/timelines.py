"""Index of a run's timelines: which frame holds which group, and what each frame covers. Frames themselves are read
when they are shown, because the timelines of a long run do not fit into memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from asyncrl.observability import timeline
from asyncrl.observability.timeline import (
    ROLLOUT,
    BatchTimeline,
    EngineSpan,
    GroupTimeline,
    ProcessSpan,
    PublishTimeline,
    Record,
)
from asyncrl.records.frames import FramePosition

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

    def refresh(self) -> None:
        """Read the frames that were written since the last call. Raises RecordError on damage."""
        for process in timeline.processes(self._run):
            for after, records in timeline.read(self._run, process, self._after.get(process)):
                place = process, self._after.get(process, FramePosition(0, 0))
                if after.file != place[1].file:  # the first frame of the next file
                    place = process, FramePosition(after.file, 0)
                self._note(place, records)
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
                yield from (one for one in self._frame(place) if _begins(one) < end and _ends(one) > start)

    # -- internals -----------------------------------------------------------------------------------------

    def _note(self, place: Place, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, GroupTimeline) and place[0] == ROLLOUT:
                self._groups[record.uid] = place
            elif isinstance(record, BatchTimeline):
                self.batches[record.step] = record
            elif isinstance(record, PublishTimeline):
                self.publishes[record.version] = record
        spans = [record for record in records if not isinstance(record, EngineSpan)]
        if spans:
            self._covers.append((min(map(_begins, spans)), max(map(_ends, spans)), place))

    def _frame(self, place: Place) -> list[Record]:
        if place not in self._decoded:
            _, records = next(timeline.read(self._run, *place))
            self._decoded[place] = records
            if len(self._decoded) > KEPT_FRAMES:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(place)
        return self._decoded[place]


def _begins(record: Record) -> float:
    match record:
        case GroupTimeline():
            return record.admitted
        case BatchTimeline():
            return record.asked
        case PublishTimeline():
            return record.held
        case ProcessSpan() | EngineSpan():
            return record.start


def _ends(record: Record) -> float:
    match record:
        case GroupTimeline():
            return record.ended
        case BatchTimeline():
            return record.taken
        case PublishTimeline():
            return record.released
        case ProcessSpan() | EngineSpan():
            return record.end
