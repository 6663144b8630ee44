"""Recorders of a run: what the buffer is told and decides, and the trainer's scores, as the events of a recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.extension import RolloutHooks
from asyncrl.extensions.recording import events
from asyncrl.extensions.recording.events import Committed, CompressedGroup, Rejected, Scored, packed, scored
from asyncrl.extensions.recording.writer import RECORDS, TRAINER, Writer
from asyncrl.observability.timeline import BatchScores, Record
from asyncrl.rollout.events import Event, GroupCommitted, GroupRejected
from asyncrl.schema import Group

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import RolloutRun


class Recorder(RolloutHooks):
    """Records the events of the rollout process, with record=true. If writing fails, the run goes on and warns once."""

    def start(self, run: RolloutRun) -> None:
        """Begin to write into the run folder."""
        enabled = run.config.record
        self._writer = Writer[events.Event](run.run_dir / RECORDS, warn=run.warn) if enabled else None
        self._seconds = 0.0
        self._reported = (0.0, 0)

    def event(self, event: Event) -> None:
        """Write an event, with its images."""
        if self._writer is None:
            return
        began = time.perf_counter()
        self._writer.write(*_recorded(event))
        self._seconds += time.perf_counter() - began

    def flush(self) -> None:
        """Wait until all events would survive the death of this process."""
        if self._writer:
            self._writer.flush()

    def figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        if self._writer is None:
            return {}
        now = (self._seconds + self._writer.seconds, self._writer.written)
        seconds, size = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        return {"time/recording": seconds, "recording/bytes": float(size)}

    async def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()


def _recorded(event: Event) -> tuple[events.Event, Mapping[str, bytes] | None]:
    """Return what is written of an event, and the images that it names."""
    if not isinstance(event, GroupCommitted | GroupRejected):
        return event, None
    content: Any = _content(event.group) if event.group else None
    images = event.group.images if event.group and content and content.images else None
    if isinstance(event, GroupCommitted):
        return Committed(event.slot, content, event.discarded), images
    return Rejected(event.slot, event.reason, event.tokens, content), images


def _content(group: Group) -> Any:
    """Return the content of a group. One that another process has encoded has it compressed."""
    done: CompressedGroup | None = getattr(group, "compressed", None)
    return done or packed(group)


class ScoreRecorder:
    """Records the trainer's own log-probabilities of batches. If writing fails, the run goes on and warns once."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._writer = Writer[Scored](run_dir / RECORDS / TRAINER, warn=warn)

    def record(self, record: Record) -> None:
        """Write the scores of a batch."""
        if isinstance(record, BatchScores):
            self._writer.write(scored(record.step, record.logprobs.tolist()))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
