"""The files of timelines: what every episode and every process of a run did, and when.

    RUN/timeline/rollout/      groups, batches, publishes and restarts of the rollout process
    RUN/timeline/trainer-0/    the phases of a trainer rank; launcher/: restarts
    RUN/timeline/engines/      spans that engines and the router sent (observe.engines=true)

Each folder holds frames as a recording does (asyncrl/extensions/recording), with an index of the groups and steps of
each frame. A resumed run appends: of two records of one group or step, the later one is of the run that went on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncrl.errors import RecordError
from asyncrl.extensions.recording.frames import FramePosition
from asyncrl.extensions.recording.index import IndexEntry
from asyncrl.extensions.recording.writer import Writer
from asyncrl.observability import timeline
from asyncrl.observability.timeline import BatchTimeline, GroupTimeline, ProcessSpan, PublishTimeline

FOLDER = "timeline"
ROLLOUT, LAUNCHER, ENGINES = timeline.ROLLOUT, timeline.LAUNCHER, "engines"
"""Folders of processes; those of trainer ranks are trainer-0, trainer-1, ..."""
LINGER = 0.5
"""Seconds that records are collected for one frame. Readers of a running run are behind by this much."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The rollout process has started or was resumed; the following records are of this run_id."""

    run_id: str
    time: float


class EngineSpan(msgspec.Struct, frozen=True, tag="engine"):
    """A span of an engine or of the router, as it was received. Ids are hexadecimal."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start: float
    end: float
    attributes: dict[str, str | float] = {}


Record = Started | GroupTimeline | BatchTimeline | PublishTimeline | ProcessSpan | EngineSpan
_decoder = msgspec.msgpack.Decoder(list[Record])


def decode(data: bytes) -> list[Record]:
    """Decode the records of a frame. Raises RecordError if it holds anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(f"a frame holds no timeline: {error}") from None


def index_entry(place: FramePosition, end: int, held: Sequence[Record]) -> IndexEntry:
    """Build the index entry of a frame from its records."""
    groups = [record.uid for record in held if isinstance(record, GroupTimeline)]
    steps = [record.step for record in held if isinstance(record, BatchTimeline)]
    versions = [record.version for record in held if isinstance(record, PublishTimeline)]
    return IndexEntry(place.file, place.offset, end, groups, steps, versions)


def folder_of(run: Path, process: str) -> Path:
    """Return the folder of a process's timeline."""
    return run / FOLDER / process.replace(" ", "-")


def writer(run: Path, process: str, warn: Callable[[str], None] = print) -> Writer[Record]:
    """Return a writer of the timeline of a process, which appends to that of an earlier start. `warn` is called once if
    it fails."""
    return Writer(folder_of(run, process), decode=decode, entry=index_entry, linger=LINGER, warn=warn)


class TimelineWriter:
    """Writes the timeline of a process: all records but those of groups outside of the share. If it fails, the run goes
    on without it, and `warn` is called once."""

    def __init__(self, run: Path, process: str, warn: Callable[[str], None], share: float = 1.0) -> None:
        self._share = share
        self._writer: Writer[Record] | None = None
        try:
            self._writer = writer(run, process, warn)
        except (OSError, RecordError) as error:
            warn(f"the timeline ends here: {error}. The run continues without it.")

    def record(self, record: timeline.Record | Record) -> None:
        """Write a record, in the writer's thread."""
        left_out = isinstance(record, GroupTimeline) and not in_sample(record.uid, self._share)
        if self._writer and isinstance(record, Record) and not left_out:
            self._writer.write(record)

    @property
    def seconds(self) -> float:
        """CPU seconds of the writer's thread so far."""
        return self._writer.seconds if self._writer else 0.0

    def close(self) -> None:
        """Write the remaining records."""
        if self._writer:
            self._writer.close()


def in_sample(uid: str, share: float) -> bool:
    """Return whether a group is among the share whose timelines are recorded."""
    return share >= 1.0 or zlib.crc32(uid.encode()) < share * 2**32
