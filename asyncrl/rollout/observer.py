"""The rollout process's part in observability: its timeline, the metrics that are made of it, and what extensions make
of it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from time import time

from asyncrl.extension import RolloutHooks
from asyncrl.observability.episodes import EpisodeFigures
from asyncrl.observability.timeline import ROLLOUT, Record, Started, TimelineWriter, sampled
from asyncrl.rollout.gpus import Gpus
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.rollout.timelines import Timelines


class Observer:
    """Everything that is observed in the rollout process."""

    def __init__(
        self,
        run: RolloutRun,
        correct: Mapping[str, Callable[[float], bool]],
        hooks: Sequence[RolloutHooks] = (),
    ) -> None:
        """`correct` says for each task whether a reward is that of a correct answer."""
        self._hooks = hooks
        self.gpus = Gpus()
        self._episodes = EpisodeFigures(correct)
        metrics = run.config.metrics
        self._timeline = TimelineWriter(run.run_dir, ROLLOUT, run.warn, enabled=metrics.timeline)
        self._timeline(Started(run.addresses.run_id, time()))
        listeners: list[Callable[[Record], None]] = [self._episodes, *(one.record for one in hooks)]
        self.timelines = Timelines([sampled(self._timeline, metrics.timeline_share)], listeners)
        self._told = self._measured = 0.0

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        total = self.timelines.seconds + self._timeline.seconds
        metrics = self.timelines.metrics_seconds
        seconds = {"time/timeline": total - self._told, "time/metrics": metrics - self._measured}
        self._told, self._measured = total, metrics
        own = {**seconds, **self._episodes.take_figures(), **self.gpus.take_figures()}
        return {**own, **dict(ChainMap(*(one.figures() for one in self._hooks)))}

    def ready(self, started: float) -> None:
        """Record that all engines can answer; the command started at that time."""
        self._timeline.phase("start_up", -1, started, time())

    async def close(self) -> None:
        """Write what is left."""
        self._timeline.close()
