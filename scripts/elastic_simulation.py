"""Simulation of a run whose engines, lead, concurrency and trainer change while it is under way (elastic.py).

An engine that joins serves after `join` seconds. One that leaves gives its requests to the engines with the fewest,
where they are prefilled again and continue from their last token. A trainer that gives or gets GPUs stands still for
`limits.move_seconds`. One that lends them while it waits (`limits.lends`) follows the rule of real runs; half of
`limits.hand_over` passes before the engines of a loan serve, and half after the batch is complete.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from asyncrl.engine.loans import PAYS, LoanRule
from asyncrl.planner.elastic import ElasticController, ElasticDecision, ElasticLimits
from asyncrl.planner.elastic_window import StepObservation
from asyncrl.planner.engine import SimulatedEngine
from asyncrl.planner.simulation import (
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
    lent_seconds: float = 0.0
    """Seconds for which engines served on the trainer's GPUs, summed over engines."""

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
    return ElasticResult(
        run.now, trained, run.engine_seconds, max(run.staleness), run.decisions, run.setting, run.lent_seconds
    )


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
        self._groups: dict[GroupInFlight, Sequence[SimulatedEpisode]] = {}
        self._groups_ended: list[Sequence[tuple[float, float]]] = []
        self._step_began, self._before = 0.0, (0.0, 0.0)  # of the step: time; trained tokens and busy seconds
        self._still_until = self.engine_seconds = 0.0
        self._loans = LoanRule()
        self._may_lend, self._loan = False, list[SimulatedEngine]()
        self._loan_began: float | None = None
        self.lent_seconds = self._lent_before = 0.0

    # -- what a step measures ------------------------------------------------------------------------------

    def _first_turns(self, playing: GroupInFlight, episodes: Sequence[SimulatedEpisode]) -> None:
        self._groups[playing] = episodes
        super()._first_turns(playing, episodes)

    def _turn(
        self, playing: GroupInFlight, episode: SimulatedEpisode, number: int, context: float, home: EngineAffinity
    ) -> None:
        if self._left(home.engine):
            home.engine = self._fewest_requests()
        super()._turn(playing, episode, number, context, home)

    def _ended(self, playing: GroupInFlight) -> None:
        super()._ended(playing)
        if not playing.left:
            self._groups_ended.append([(one.tokens, sum(one.seconds)) for one in self._groups.pop(playing)])

    def _take(self) -> None:
        if self.now < self._still_until or self._training:
            return
        setting, begun = self.setting, self._loan_began is not None
        if begun:  # the trainer begins after the second half of the hand-over
            self.setting = replace(setting, train_fixed=setting.train_fixed + self._hand_over / 2)
        super()._take()
        self.setting = setting
        if self._training:
            self._end_wait(begun=begun)
        elif self._may_lend and not begun and not self._part:
            self._lend_when_due()

    # -- loans of the trainer's GPUs -----------------------------------------------------------------------

    @property
    def _hand_over(self) -> float:
        return self._limits.hand_over if self._limits else 0.0

    def _lend_when_due(self) -> None:
        """Begin a loan if the rule says so, and look again when it may have changed its mind."""
        waited = self.now - self._asked_at
        if self._loans.due(waited):
            self._loan_began = self.now
            self._at(self.now + self._hand_over / 2, partial(self._lend, self._loan_began))
        elif waited == 0.0:
            self._at(self._asked_at + PAYS * self._hand_over, lambda: None)

    def _lend(self, began: float) -> None:
        """Let the engines of a loan serve, if it has not ended since it began."""
        if self._loan_began == began:
            assert self._limits
            self._loan = [self._add_engine() for _ in range(self._limits.lendable)]

    def _end_wait(self, *, begun: bool) -> None:
        """End the wait for a batch, and with it the loan."""
        self._loans.ended(self.now - self._asked_at, self._hand_over if begun else None)
        if self._loan_began is not None:
            served = self.now - self._loan_began - self._hand_over / 2
            self.lent_seconds += max(0.0, served) * len(self._loan)
        for engine in self._loan:
            self._remove_engine(engine)
        self._loan, self._loan_began = [], None

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
        lent, self._lent_before = self.lent_seconds - self._lent_before, self.lent_seconds
        seen = StepObservation(
            self._buffer.version,
            self.now,
            seconds,
            max(0.0, seconds - spent),
            pause,
            trained - self._before[0],
            engines,
            ended,
            lent=lent / max(seconds, 1e-9),
            made=len(ended) / self.workload.batch_groups,
        )
        if self._controller and (decision := self._controller.observe(seen)):
            self.decisions.append(decision)
            if decision.action == "lend_trainer":
                self._may_lend = bool(self._limits and self._limits.lends)
            else:
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
            self._at(self.now + self._join, self._join_engine)
        for _ in range(-change):
            self._remove_engine(self._fewest_requests())

    def _join_engine(self) -> None:
        self._add_engine()

    def _add_engine(self) -> SimulatedEngine:
        engine = SimulatedEngine(self.setting.shape)
        self._engines.append(engine)
        self._places[engine] = len(self._due)
        self._due.append(math.inf)
        self._open.append(0.0)
        self._count(engine, 0)
        if self._held is not None:
            engine.pause(self.now)
        return engine

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
