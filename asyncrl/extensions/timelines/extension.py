"""What this folder adds: the files of timelines in every run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.settings import Section, Share

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.extensions.timelines.files import TimelineWriter
    from asyncrl.observability.timeline import Record, RecordListener
    from asyncrl.rollout.reporters import RolloutRun


class TimelineSettings(Section):
    """What every episode and process did, and when (docs/operations.md)."""

    record: bool = True
    """Record it in timeline/."""
    share: Share = 1.0
    """Share of the groups whose timelines are recorded and traced; which ones they are depends on their uids alone."""


def settings_of(config: Config) -> TimelineSettings:
    """Return the section of a configuration."""
    found: TimelineSettings = (config.model_extra or {})["timelines"]
    return found


class TimelineRollout(extension.RolloutHooks):
    """Writes the timeline of the rollout process."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._reported = 0.0

    def start(self, run: RolloutRun) -> None:
        """Begin with the run's id."""
        from asyncrl.extensions.timelines.files import ROLLOUT, Started, TimelineWriter

        self._writer: TimelineWriter = TimelineWriter(run.run_dir, ROLLOUT, run.warn, self._share)
        self._writer.record(Started(run.addresses.run_id, time.time()))

    def record(self, record: Record) -> None:
        """Write it."""
        self._writer.record(record)

    def figures(self) -> dict[str, float]:
        """Return the CPU seconds of the writer's thread since the last call."""
        before, self._reported = self._reported, self._writer.seconds
        return {"timelines/time": self._reported - before}

    async def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class TimelinesExtension(extension.Extension):
    """The timelines of all processes, in files."""

    Settings = TimelineSettings
    trains = False
    metrics = {"timelines/time": "CPU time of writing timelines in the rollout process since the previous step"}  # noqa: RUF012

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        return TimelineRollout(self.settings.share) if self.settings.record else extension.RolloutHooks()

    def phases(self, config: Config, run_dir: Path, process: str, warn: Callable[[str], None]) -> RecordListener | None:
        """Return what writes the phases of a process."""
        if not self.settings.record:
            return None
        from asyncrl.extensions.timelines.files import TimelineWriter

        return TimelineWriter(run_dir, process, warn)


Own = TimelinesExtension
