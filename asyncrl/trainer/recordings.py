"""Recordings on the trainer's side: batches for mode=replay, a publisher without engines, and the trainer's own
log-probabilities of recorded batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from asyncrl.config import ReplayConfig
from asyncrl.errors import RecordError
from asyncrl.records.events import Scored, scored
from asyncrl.records.reading import RECORDS, TRAINER, Recording
from asyncrl.records.writer import Writer
from asyncrl.schema import Batch, Group, Turn, VersionSpan, encode, part_of
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.user_code import load
from asyncrl.weights.publisher import UNSENT, Staged, StagedPublisher


class ReplaySource(BatchSource):
    """Batch source that reads a recording."""

    def __init__(self, replay: ReplayConfig) -> None:
        self._recording = Recording(replay.folder)
        self._keep: Callable[[Group], bool | str] | None = load(replay.keep, "replay.keep") if replay.keep else None
        steps = self._recording.steps
        first = steps[0] if replay.first is None else replay.first
        last = steps[-1] if replay.last is None else replay.last
        if missing := sorted(set(range(first, last + 1)) - set(steps)):
            raise RecordError(f"{self._recording.folder} holds batches {steps[0]} to {steps[-1]}, and no {missing[0]}")
        self._steps = list(range(first, last + 1)) * replay.loop
        self.first = first
        """Version to start from."""
        self.end = first + len(self._steps)
        """Version after the last batch."""

    def batch(self, version: int, part: int = 0, parts: int = 1, *, interrupt: Callable[[], bool]) -> bytes:
        """Return the batch of this version, or a part of it. Versions are shifted so that a batch that is trained again
        keeps its staleness. Raises RecordError if `replay.keep` rejects all groups."""
        recorded = self._recording.batch(self._steps[version - self.first])
        groups = [group for group in recorded.groups if self._keep is None or self._keep(group) is True]
        if not groups:
            raise RecordError(f"replay.keep keeps no group of batch {recorded.version}")
        start, end = part_of(len(groups), part, parts := min(parts, len(groups)))
        last = part + 1 == parts
        taken = Batch(recorded.version, groups[start:end], recorded.rollout if last else {}, last)
        return encode(later(taken, version - recorded.version))


class NoEngines(StagedPublisher):
    """Publisher for a run in which nothing generates."""

    def __init__(self, announce: Callable[[int], object], *, first: bool) -> None:
        """`first` is True on rank 0, which alone announces versions."""
        self._announce = announce
        self._first = first

    def stage(self, version: int) -> Staged:
        """Copy no weights."""
        return Staged(version, UNSENT)

    def complete(self, staged: Staged) -> dict[str, float]:
        """Announce the version."""
        if self._first:
            self._announce(staged.version)
        return staged.metrics


def later(batch: Batch, versions: int) -> Batch:
    """Return the batch with all versions shifted by `versions`, so that every token keeps its staleness."""
    if not versions:
        return batch

    def moved(turn: Turn) -> Turn:
        spans = [
            VersionSpan(span.version + versions, span.start, span.end, span.inferred)
            for span in turn.completion.versions
        ]
        return replace(turn, completion=replace(turn.completion, versions=spans))

    def moved_group(group: Group) -> Group:
        played = [replace(one, turns=[moved(turn) for turn in one.turns]) for one in group.trajectories]
        return replace(group, trajectories=played)

    groups = [moved_group(group) for group in batch.groups]
    return replace(batch, version=batch.version + versions, groups=groups)


class ScoreWriter:
    """Writes the scores, if `enabled`: on rank 0 of a recorded run. If writing fails, the run continues and warns
    once."""

    def __init__(self, run_dir: Path, warn: Callable[[str, int], None], *, enabled: bool) -> None:
        self._writer: Writer[Scored] | None = Writer(run_dir / RECORDS / TRAINER) if enabled else None
        self._warn = warn
        self._warned = False

    def write(self, step: int, logprobs: Callable[[], Tensor]) -> None:
        """Write the log-probabilities of a batch's tokens, [N]."""
        if self._writer is None:
            return
        self._writer.write(scored(step, logprobs().tolist()))
        if self._writer.failed and not self._warned:
            self._warned = True
            self._warn(f"{self._writer.failed}. The run continues without it.", step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer:
            self._writer.close()
