"""Simulation of a run whose engines, lead, concurrency and trainer change while it is under way (elastic.py).

An engine that joins serves after `join` seconds. One that leaves gives its requests to the engines with the fewest,
where they are prefilled again and continue from their last token. A trainer that gives or gets GPUs stands still for
`limits.move_seconds`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.extensions.plan.elastic import ElasticController, ElasticDecision, ElasticLimits
from asyncrl.extensions.plan.elastic_window import StepObservation
from asyncrl.extensions.plan.engine import SimulatedEngine
from asyncrl.extensions.plan.simulation import (
    EngineAffinity,
    GroupInFlight,
    Setting,
    SimulatedEpisode,
    SimulatedRun,
    SimulatedWorkload,
)


@dataclass(frozen=True)
class ElasticResult:
    """Result of a whole simulated run, its start included."""

    seconds: float
    tokens: float
    """Trained tokens."""
    engine_seconds: float
    """Seconds for which engines were part of the run, summed over engines."""
    staleness_max: int
    decisions: Sequence[ElasticDecision]
    last: Setting

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.tokens / self.seconds


def simulate_elastic(
    workload: SimulatedWorkload,
    setting: Setting,
    steps: int,
    limits: ElasticLimits | None = None,
    join: float = 0.0,
    ties: int | None = None,
) -> ElasticResult:
    """Simulate so many steps from the start; under a controller if there are limits. `ties` seeds the choice between
    engines that have the fewest requests, of which the first is taken otherwise. It alone changes the throughput of
    100 steps by some percent, because long groups meet on one engine or do not."""
    run = _ElasticRun(workload, setting, limits, join, ties)
    run.until(steps)
    trained = run.counters()[0]
    return ElasticResult(run.now, trained, run.engine_seconds, max(run.staleness), run.decisions, run.setting)


class _ElasticRun(SimulatedRun):
    def __init__(
        self,
        workload: SimulatedWorkload,
        setting: Setting,
        limits: ElasticLimits | None,
        join: float,
        ties: int | None = None,
    ) -> None:
        super().__init__(workload, setting)
        self._ties = None if ties is None else random.Random(ties)
        self.decisions: list[ElasticDecision] = []
        self._limits, self._join = limits, join
        self._controller = (
            ElasticController(setting, workload.batch_groups, limits, prompt=workload.prompt) if limits else None
        )
        self._groups_ended: list[Sequence[tuple[float, float]]] = []
        self._step_began, self._before = 0.0, (0.0, 0.0)  # of the step: time; trained tokens and busy seconds
        self._still_until = self.engine_seconds = 0.0

    # -- what a step measures ------------------------------------------------------------------------------

    def _turn(
        self, playing: GroupInFlight, episode: SimulatedEpisode, number: int, context: float, home: EngineAffinity
    ) -> None:
        if self._left(home.engine):
            home.engine = self._fewest_requests()
        super()._turn(playing, episode, number, context, home)

    def _ended(self, playing: GroupInFlight) -> None:
        super()._ended(playing)
        if not playing.left:
            self._groups_ended.append([(one.tokens, sum(one.seconds)) for one in playing.episodes])

    def _take(self) -> None:
        if self.now < self._still_until or self._training:
            return
        super()._take()

    def _published(self) -> None:
        held, self._held = self._held or [], []  # a change comes before the next requests
        super()._published()
        trained, busy, *_ = self.counters()
        seconds = self.now - max(self._step_began, self._still_until)
        pause = self.setting.pause
        spent = busy - self._before[1] + (0.0 if self.setting.overlap else pause)
        ended, self._groups_ended = self._groups_ended, []
        engines = sum(not self._left(engine) for engine in self._engines)
        self.engine_seconds += engines * (self.now - self._step_began)
        seen = StepObservation(
            self._buffer.version,
            self.now,
            seconds,
            max(0.0, seconds - spent),
            pause,
            trained - self._before[0],
            engines,
            ended,
            made=len(ended) / self.workload.batch_groups,
        )
        if self._controller and (decision := self._controller.observe(seen)):
            self.decisions.append(decision)
            self._change(self._controller.setting)
        self._step_began, self._before = self.now, (trained, busy)
        for request in held:
            request()

    # -- changes -------------------------------------------------------------------------------------------

    def _change(self, wanted: Setting) -> None:
        """Take over engines, lead, concurrency and trainer of a setting. Its speeds are estimates."""
        assert self._limits
        change = wanted.engines - self.setting.engines
        if change and self._limits.devices:
            self._still_until = self.now + self._limits.move_seconds
            self._at(self._still_until, lambda: None)
        self.setting = replace(
            self._limits.with_engines(self.setting, wanted.engines), lead=wanted.lead, in_play=wanted.in_play
        )
        if wanted.lead is not None:
            self._buffer.change_lead(wanted.lead)
        for _ in range(change):
            self._at(self.now + self._join, self._add_engine)
        for _ in range(-change):
            self._remove_engine(self._fewest_requests())

    def _add_engine(self) -> None:
        engine = SimulatedEngine(self.setting.shape)
        self._engines.append(engine)
        self._places[engine] = len(self._due)
        self._due.append(math.inf)
        self._open.append(0.0)
        self._count(engine, 0)
        if self._held is not None:
            engine.pause(self.now)

    def _remove_engine(self, engine: SimulatedEngine) -> None:
        """Let an engine leave: its requests continue on others."""
        self._count(engine, math.inf)
        moved = [(job, number, home) for job, (_, _, number, home) in self._jobs.items() if home.engine is engine]
        for job, _, _ in moved:
            engine.abort(job, self.now)
        self._expect(engine)
        for job, number, home in moved:
            if home.engine is engine:
                home.engine = self._fewest_requests()
                self._count(home.engine, home.first_turns > 0)
            self._count(home.engine, number > 0)
            home.engine.submit(job, self.now)
            self._expect(home.engine)

    def _fewest_requests(self) -> SimulatedEngine:
        if self._ties is None:
            return super()._fewest_requests()
        fewest = min(self._open)
        return self._engines[self._ties.choice([place for place, one in enumerate(self._open) if one == fewest])]

    def _left(self, engine: SimulatedEngine) -> bool:
        return self._open[self._places[engine]] == math.inf
