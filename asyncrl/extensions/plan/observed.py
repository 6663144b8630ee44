"""Observations of a run in progress for the controller (elastic.py), from metrics.jsonl and the timeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.config import Config
from asyncrl.extensions.plan.elastic import GROUPS
from asyncrl.extensions.plan.elastic_window import StepObservation
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.fit import engine_times, outside
from asyncrl.extensions.plan.search import in_play
from asyncrl.extensions.plan.simulation import Setting
from asyncrl.extensions.timelines import files, reader
from asyncrl.jsonl import Tail
from asyncrl.observability.timeline import GroupTimeline

FEWEST = 32
"""Number of groups from which the speed of an engine is measured."""


def setting_of(config: Config) -> Setting:
    """Return a run's setting as it starts, with speeds that the first observations replace."""
    engine, rollout = config.engine, config.rollout
    return Setting(
        engines=engine.started + len(engine.urls),
        train_rate=1.0,
        max_staleness=rollout.max_staleness,
        lead=rollout.effective_lead,
        parts=config.trainer.batch_parts,
        overlap=config.weights.overlap,
        in_play=in_play(rollout.max_running_groups, rollout.group_size),
        shape=EngineShape(
            max_running=engine.max_running_requests, kv_tokens=float(engine.max_total_tokens or math.inf)
        ),
    )


class RunObserver:
    """Follows the files of a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Begin with what is written from now on."""
        self._run_dir, self._shape = run_dir, setting_of(config).shape
        self._batch, self._size = config.rollout.batch_groups, config.rollout.group_size
        self._steps, timelines = Tail(run_dir / "metrics.jsonl", new=True), reader.TimelineReader(run_dir)
        timelines.skip()
        self._position = timelines.positions.get(files.ROLLOUT)
        self._recent: deque[GroupTimeline] = deque(maxlen=GROUPS)

    def new(self) -> Iterator[StepObservation]:
        """Yield the steps since the last call. Raises RecordError if the timeline is damaged."""
        for step in self._steps():
            yield self._observed(step, [self._episodes(group) for group in self._groups()])

    def _groups(self) -> Iterator[GroupTimeline]:
        for position, records in reader.read(self._run_dir, files.ROLLOUT, self._position):
            self._position = position
            for one in records:
                if isinstance(one, GroupTimeline) and (one.purpose, one.outcome) == ("training", "committed"):
                    self._recent.append(one)
                    yield one

    def _episodes(self, group: GroupTimeline) -> list[tuple[float, float]]:
        return [(float(one.tokens), outside(one)) for one in group.episodes]

    def _observed(self, step: dict[str, Any], groups: list[list[tuple[float, float]]]) -> StepObservation:
        engines = int(step["engines/serving"])
        size = fmean(len(group.episodes) for group in self._recent) if self._recent else self._size
        if engines and len(self._recent) >= FEWEST:
            per_token, per_request = engine_times(self._recent, engines)
            self._shape = replace(self._shape, per_token=per_token, per_request=per_request)
        return StepObservation(
            step=int(step["step"]),
            time=step["time/since_start"],
            seconds=step["time/step"],
            waited=step["time/wait_batch"],
            paused=step["time/pause"],
            tokens=self._batch * size * step["completion/length"] * step["episodes/turns"],
            engines=engines,
            groups=groups,
            shape=self._shape,
            lead=int(step["admission/lead"]),
            turns=step["episodes/turns"],
            made=step["samples/generated"] / (self._batch * size),
            prompt=step.get("prompt/length"),
        )
