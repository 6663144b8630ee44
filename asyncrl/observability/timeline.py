"""The timeline of a run: what every episode and every process did, and when.

    RUN/timeline/rollout/      groups, batches, publishes and restarts of the rollout process
    RUN/timeline/trainer-0/    the phases of a trainer rank; launcher/: restarts
    RUN/timeline/engines/      spans that engines and the router sent (observe.engines=true)

Each folder holds frames as a recording does (asyncrl/records), with an index of the groups and steps of each frame.
Times are those of `time.time`, so that processes and machines compare. A resumed run appends: of two records of one
group or step, the later one is of the run that went on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncrl.errors import RecordError
from asyncrl.observability.intervals import Interval
from asyncrl.records.frames import FramePosition
from asyncrl.records.index import IndexEntry
from asyncrl.records.writer import Writer

FOLDER = "timeline"
ROLLOUT, LAUNCHER, ENGINES = "rollout", "launcher", "engines"
"""Processes by the names of their folders; trainer ranks are trainer-0, trainer-1, ..."""
LINGER = 0.5
"""Seconds that records are collected for one frame. Readers of a running run are behind by this much."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The rollout process has started or was resumed; the following records are of this run_id."""

    run_id: str
    time: float


class EpisodeTimeline(msgspec.Struct, frozen=True, array_like=True):
    """One episode of a group."""

    reward: float | None  # None if it was not scored
    tokens: int  # that engines generated for it
    intervals: list[Interval]


class GroupTimeline(msgspec.Struct, frozen=True, tag="group"):
    """A group that has ended, or the attempts at a question of an evaluation."""

    uid: str
    slot: int  # -1 in an evaluation
    task: str  # or the evaluation set
    purpose: str  # training or evaluation
    born: int  # version when it was admitted
    admitted: float
    ended: float
    outcome: str  # "committed", or the reason of its rejection
    episodes: list[EpisodeTimeline]


class BatchTimeline(msgspec.Struct, frozen=True, tag="batch"):
    """A batch, written when it is taken."""

    step: int
    asked: float  # when the trainer began to wait for it, or for the last of its parts
    taken: float
    uids: list[str]
    last: str = ""  # uid of the group that it waited for last; "" if it was ready


class PublishTimeline(msgspec.Struct, frozen=True, tag="published"):
    """A publish as the rollout process sees it: requests were held back in between."""

    version: int
    held: float
    released: float


class ProcessSpan(msgspec.Struct, frozen=True, tag="span"):
    """A phase of a trainer rank or of the launcher."""

    process: str  # "trainer 0", "launcher", "rollout"
    name: str  # forward, backward, optimizer, gather, publish, checkpoint, restart, ...
    start: float
    end: float
    step: int = -1
    attributes: dict[str, str | float] = {}


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


def writer(run: Path, process: str) -> Writer[Record]:
    """Return a writer of the timeline of a process, which appends to that of an earlier start."""
    return Writer(folder_of(run, process), decode=decode, entry=index_entry, linger=LINGER)


class TimelineWriter:
    """Writes the timeline of a process, if that is enabled. If it fails, the run goes on without it, and `warn` is
    called once."""

    def __init__(self, run: Path, process: str, warn: Callable[[str], None], *, enabled: bool = True) -> None:
        self._process, self._warn = process, warn
        self._writer: Writer[Record] | None = None
        try:
            self._writer = writer(run, process) if enabled else None
        except (OSError, RecordError) as error:
            self._fail(error)

    def __call__(self, record: Record) -> None:
        """Write a record, in the writer's thread."""
        if self._writer:
            self._writer.write(record)
            if self._writer.failed:
                self._fail(self._writer.failed)

    def phase(self, name: str, step: int, start: float, end: float, thread: str = "") -> None:
        """Write a phase of the process, or of one of its threads, which overlaps with those of the others."""
        self(ProcessSpan(f"{self._process} {thread}".rstrip(), name, start, end, step))

    @property
    def seconds(self) -> float:
        """CPU seconds of the writer's thread so far."""
        return self._writer.seconds if self._writer else 0.0

    def close(self) -> None:
        """Write the remaining records."""
        if self._writer:
            self._writer.close()

    def _fail(self, error: Exception) -> None:
        self._writer = None
        self._warn(f"the timeline ends here: {error}. The run continues without it.")


def in_sample(uid: str, share: float) -> bool:
    """Return whether a group is among the share whose timelines are recorded."""
    return share >= 1.0 or zlib.crc32(uid.encode()) < share * 2**32


def sampled(write: Callable[[Record], None], share: float) -> Callable[[Record], None]:
    """Return a function that writes all records but those of groups outside of the share."""

    def listen(record: Record) -> None:
        if not isinstance(record, GroupTimeline) or in_sample(record.uid, share):
            write(record)

    return listen
