"""Simulation of two options for the long tail: answers that move between engines (rollout.migrate_after, with every
answer in a request of its own), and the order in which the prompts of a cohort are started (rollout.start_order).

A group whose lengths were seen before counts as a question of an earlier epoch, whose answers take as long again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from asyncrl.engine.migration import LEAST_LEFT, PERIOD, moves
from asyncrl.planner.engine import SimulatedEngine, SimulatedRequest
from asyncrl.planner.simulation import (
    EngineAffinity,
    GroupInFlight,
    Setting,
    SimulatedEpisode,
    SimulatedRun,
    SimulatedWorkload,
    SimulationResult,
)

Order = Literal["in_order", "shortest_first", "longest_first"]
RECENT = 64
"""Number of groups whose mean length stands for groups that were not seen before."""


@dataclass(frozen=True)
class LongTail:
    """The options, as the settings of the same names under rollout."""

    migrate_after: int | None = None
    migrate_below: float = 0.75
    start_order: Order = "in_order"


def simulate_long_tail(
    workload: SimulatedWorkload, setting: Setting, options: LongTail, steps: int, warm: int = 4
) -> SimulationResult:
    """Simulate `warm` + `steps` steps with these options and measure the latter."""
    return _LongTailRun(workload, setting, options).measure(steps, warm)


class _LongTailRun(SimulatedRun):
    def __init__(self, workload: SimulatedWorkload, setting: Setting, options: LongTail) -> None:
        super().__init__(workload, setting)
        self._options, self._moves = options, options.migrate_after is not None
        self._seen, self._recent = set[float](), deque[float](maxlen=RECENT)  # total lengths of groups; mean lengths
        self._had: dict[SimulatedRequest, float] = {}  # tokens of an answer before its last move
        if options.start_order != "in_order":
            self._number = self._ordered(self._number)
        if self._moves:
            self._at(PERIOD, self._migrate)

    # -- the order of starts -------------------------------------------------------------------------------

    def _ordered(self, numbers: Iterator[int]) -> Iterator[int]:
        while True:
            waiting = [next(numbers) for _ in range(self.workload.batch_groups)]
            while waiting:
                yield waiting.pop(min(range(len(waiting)), key=lambda place: self._rank(waiting[place])))

    def _rank(self, number: int) -> float:
        episodes = self.workload.episodes(number)
        total = sum(one.tokens for one in episodes)
        known = total / len(episodes) if total in self._seen else fmean(self._recent or [0.0])
        return known if self._options.start_order == "shortest_first" else -known

    def _ended(self, playing: GroupInFlight) -> None:
        super()._ended(playing)
        if not playing.left:
            self._seen.add(playing.tokens)
            self._recent.append(playing.tokens / playing.size)

    # -- moves ---------------------------------------------------------------------------------------------

    def _first_turns(self, playing: GroupInFlight, episodes: Sequence[SimulatedEpisode]) -> None:
        if not self._moves or self.setting.spread:
            super()._first_turns(playing, episodes)
            return
        engine = self._fewest_requests()
        self._needed += self.workload.prompt
        for episode in episodes:
            self._count(engine, 1)
            self._turn(playing, episode, 0, self.workload.prompt, EngineAffinity(engine, 1))

    def _migrate(self) -> None:
        self._at(self.now + PERIOD, self._migrate)
        if self._held is not None:
            return
        movable: dict[int, list[tuple[float, SimulatedRequest]]] = {}
        for job, (_, _, _, home) in self._jobs.items():
            if (length := self._movable(job, home.engine)) is not None:
                movable.setdefault(self._places[home.engine], []).append((length, job))
        loads = {place: int(requests) for place, requests in enumerate(self._open)}
        for source, target in moves(loads, self._options.migrate_below, 2, movable):
            _, longest = max(movable[source], key=lambda one: one[0])
            self._move(longest, self._engines[target])

    def _movable(self, job: SimulatedRequest, engine: SimulatedEngine) -> float | None:
        """Return the length of an answer that may move."""
        after, written = self._options.migrate_after or 0, engine.written(job, self.now)
        length = self._had.get(job, 0.0) + written
        may = written >= after and self.workload.longest - length >= max(after, LEAST_LEFT)
        return length if may else None

    def _move(self, job: SimulatedRequest, target: SimulatedEngine) -> None:
        playing, episode, number, home = self._jobs.pop(job)
        home.engine.abort(job, self.now)
        self._expect(home.engine)
        self._count(home.engine, -1)
        rest = SimulatedRequest(job.tokens - job.done, job.context + job.done, job.prefix, job.session)
        self._had[rest] = self._had.pop(job, 0.0) + job.done
        home.engine = target
        self._jobs[rest] = playing, episode, number, home
        self._count(target, 1)
        self._needed += rest.context
        target.submit(rest, self.now)
        self._expect(target)
