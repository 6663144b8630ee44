"""The batches of mode=replay."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from asyncrl.errors import RecordError
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.replay.extension import ReplaySettings
from asyncrl.schema import Batch, Group, Turn, VersionSpan, encode, part_of
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.user_code import load


class ReplaySource(BatchSource):
    """Batch source that reads a recording."""

    def __init__(self, replay: ReplaySettings) -> None:
        self._recording = Recording(replay.folder)
        self._keep: Callable[[Group], bool | str] | None = load(replay.keep, "replay.keep") if replay.keep else None
        steps = self._recording.steps
        first = steps[0] if replay.first is None else replay.first
        last = steps[-1] if replay.last is None else replay.last
        if missing := sorted(set(range(first, last + 1)) - set(steps)):
            raise RecordError(f"{self._recording.folder} holds batches {steps[0]} to {steps[-1]}, and no {missing[0]}")
        self._steps = list(range(first, last + 1)) * replay.loop
        self.first = first
        self.end = first + len(self._steps)

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
