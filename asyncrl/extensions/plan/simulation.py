"""Simulation of a run: the real buffer and concurrency controller between simulated engines and a simulated trainer.

Not simulated: the processing time of router and client, and the weight transfer except for a pause of fixed length.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from asyncrl.engine.loads import Load
from asyncrl.extensions.congestion.window import ConcurrencyWindow
from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine, SimulatedRequest
from asyncrl.rollout.buffer import CohortBuffer, Ticket
from asyncrl.schema import Group, part_of


@dataclass(frozen=True)
class SimulatedEpisode:
    """Tokens of each turn, and seconds in the environment after each turn except the last."""

    turns: Sequence[float]
    seconds: Sequence[float] = ()

    @property
    def tokens(self) -> float:
        """Return the total number of tokens."""
        return sum(self.turns)


@dataclass(frozen=True)
class SimulatedWorkload:
    """Workload of a simulated run. `episodes(number)` returns the siblings of the group that is started as number
    `number`."""

    episodes: Callable[[int], Sequence[SimulatedEpisode]]
    batch_groups: int
    prompt: float = 0.0
    """Tokens of a prompt."""
    longest: int = 1 << 20
    """Maximum tokens of an episode."""
    accepted: Callable[[int], bool] = lambda number: True
    """Whether the group that is started as number `number` may be trained."""


@dataclass(frozen=True)
class Setting:
    """Hardware and settings of a simulated run."""

    engines: int
    train_rate: float
    """Throughput of the whole trainer in tokens per second."""
    max_staleness: int
    lead: int | None = None
    _: KW_ONLY
    spread: bool = False
    """Whether the siblings of a group are spread over the engines."""
    train_fixed: float = 0.0
    """Fixed seconds per step, in addition."""
    pause: float = 0.0
    """Seconds for which a publish pauses the engines."""
    drain: bool = False
    """Whether a publish waits until no request is in flight."""
    parts: int = 1
    """Number of parts of a batch, each trained as soon as it is ready (trainer.batch_parts)."""
    overlap: bool = False
    """Whether the next batch is trained during the pause of a publish (weights.overlap)."""
    in_play: int | None = None
    """Maximum number of concurrent episodes; None: decided by the concurrency controller, 0: as many as admission
    allows."""
    observe_every: float = 1.0
    shape: EngineShape = field(default_factory=EngineShape)


@dataclass(frozen=True)
class SimulationResult:
    """Averages and counts of a simulated run, excluding the warm-up."""

    tokens_per_s: float
    step: float
    trainer_busy: float
    engines_busy: float
    """Fraction of the throughput with full batches."""
    staleness_mean: float
    staleness_max: int
    retractions: int
    prefilled: float
    """Prefilled tokens per trained token."""
    in_play: float
    """Mean number of concurrent episodes."""


class SimulatedGroup(Group, frozen=True, array_like=True):
    """A finished group, reduced to its size and the version at its start."""

    tokens: int = 0
    born: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all siblings."""
        return self.tokens


@dataclass(eq=False)
class GroupInFlight:
    """A group in flight."""

    ticket: Ticket
    episodes: Sequence[SimulatedEpisode]
    accepted: bool
    left: int  # number of episodes that have not ended
    born: int = -1  # version when the first request began; -1: none has


@dataclass(eq=False)
class EngineAffinity:
    """Engine of the episodes that stay together: all siblings, or a single one."""

    engine: SimulatedEngine
    first_turns: int  # in progress; they count as one request, because siblings request them together


def simulate(workload: SimulatedWorkload, setting: Setting, steps: int, warm: int = 4) -> SimulationResult:
    """Simulate `warm` + `steps` steps and measure the latter."""
    run = SimulatedRun(workload, setting)
    run.until(warm)
    started, before = run.now, run.counters()
    run.until(warm + steps)
    seconds, after = run.now - started, run.counters()
    trained, busy, decoded, retracted, prefilled, in_play = (b - a for a, b in zip(before, after, strict=True))
    ages, shape = run.staleness[warm * workload.batch_groups :], setting.shape
    return SimulationResult(
        trained / seconds,
        seconds / steps,
        busy / seconds,
        decoded / (setting.engines * shape.rate(shape.max_running)) / seconds,
        sum(ages) / len(ages),
        max(ages),
        int(retracted),
        prefilled / trained,
        in_play / seconds,
    )


class SimulatedRun:
    """A run in simulated time."""

    def __init__(self, workload: SimulatedWorkload, setting: Setting) -> None:
        """Prepare the run; `until` lets time pass."""
        self.workload, self.setting = workload, setting
        self.now, self.staleness = 0.0, list[int]()
        self._buffer = CohortBuffer(
            workload.batch_groups,
            setting.max_staleness,
            setting.lead,
            overlap=setting.overlap,
            clock=lambda: self.now,
        )
        self._engines = [SimulatedEngine(setting.shape) for _ in range(setting.engines)]
        self._open = [0.0] * setting.engines  # number of requests, as the router counts them; inf: has left
        self._least = [(0.0, place) for place in range(setting.engines)]  # those, lowest first, beside stale entries
        self._places = {engine: place for place, engine in enumerate(self._engines)}
        self._due = [math.inf] * setting.engines  # time of each engine's next event
        self._events: list[tuple[float, int]] = []  # (time, engine); entries that differ from _due are stale
        self._window = ConcurrencyWindow(workload.longest) if setting.in_play is None else None
        self._number: Iterator[int] = itertools.count()
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._jobs: dict[SimulatedRequest, tuple[GroupInFlight, SimulatedEpisode, int, EngineAffinity]] = {}
        self._held: list[Callable[[], None]] | None = None
        self._training = self._draining = self._waited = self._publish_waits = False
        self._part = self._in_play = 0  # number of the next part, and of episodes
        self._size = len(workload.episodes(0))  # episodes of the latest group
        self._trained = self._busy = self._in_play_seconds = self._asked_at = 0.0
        self._needed = 0.0  # tokens that need prefill, since the last observation of the engines
        if self._window:
            self._observe()

    def counters(self) -> tuple[float, ...]:
        """Return the running totals."""
        return (
            self._trained,
            self._busy,
            sum(engine.decoded for engine in self._engines),
            sum(engine.retractions for engine in self._engines),
            sum(engine.prefilled for engine in self._engines),
            self._in_play_seconds,
        )

    def until(self, version: int) -> None:
        """Run until a version is published."""
        while self._buffer.version < version:
            self._admit()
            self._take()
            self._step()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, next(self._serial), action))

    def _step(self) -> None:
        """Process the next event."""
        while self._events and self._events[0][0] != self._due[self._events[0][1]]:
            heapq.heappop(self._events)
        due, place = self._events[0] if self._events else (math.inf, 0)
        timer = self._timers[0][0] if self._timers else math.inf
        if (time := min(due, timer)) == math.inf:
            raise RuntimeError(f"the simulation cannot continue: {self._buffer.waiting_for()}")
        self._in_play_seconds += self._in_play * (time - self.now)
        self.now = time
        if timer <= due:
            heapq.heappop(self._timers)[2]()
        else:
            for job in self._engines[place].advance(time):
                self._written(job)
            self._expect(self._engines[place])

    def _expect(self, engine: SimulatedEngine) -> None:
        """Note when an engine's next event is due, after every call that may change it."""
        place, time = self._places[engine], engine.next_time()
        if time != self._due[place]:
            self._due[place] = time
            if time < math.inf:
                heapq.heappush(self._events, (time, place))

    # -- rollouts ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._may_start(self._size) and (ticket := self._buffer.admit()):
            number = next(self._number)
            episodes = self.workload.episodes(number)
            self._size = len(episodes)
            playing = GroupInFlight(ticket, episodes, self.workload.accepted(number), left=self._size)
            self._in_play += self._size
            if self._window:
                self._window.start(self._size)
            self._send(partial(self._first_turns, playing))

    def _fewest_requests(self) -> SimulatedEngine:
        """Return the engine with the fewest requests, the first of equals, like the router."""
        while self._least[0][0] != self._open[self._least[0][1]]:
            heapq.heappop(self._least)
        return self._engines[self._least[0][1]]

    def _count(self, engine: SimulatedEngine, more: float) -> None:
        """Change an engine's number of requests. Stale entries are cleared when they are most of the heap."""
        place = self._places[engine]
        self._open[place] += more
        heapq.heappush(self._least, (self._open[place], place))
        if len(self._least) > 8 * len(self._open):
            self._least = sorted((requests, place) for place, requests in enumerate(self._open))

    def _may_start(self, episodes: int) -> bool:
        if self._window:
            return self._window.may_start(episodes)
        return not self.setting.in_play or self._in_play == 0 or self._in_play + episodes <= self.setting.in_play

    def _send(self, request: Callable[[], None]) -> None:
        if self._held is None:
            request()
        else:
            self._held.append(request)

    def _first_turns(self, playing: GroupInFlight) -> None:
        for together in [[one] for one in playing.episodes] if self.setting.spread else [playing.episodes]:
            home = EngineAffinity(self._fewest_requests(), len(together))
            self._count(home.engine, 1)
            self._needed += self.workload.prompt
            for episode in together:
                self._turn(playing, episode, 0, self.workload.prompt, home)

    def _turn(
        self, playing: GroupInFlight, episode: SimulatedEpisode, number: int, context: float, home: EngineAffinity
    ) -> None:
        prefix = (("prompt", playing.ticket.uid), self.workload.prompt) if self.workload.prompt else None
        session = id(episode) if len(episode.turns) > 1 else None
        job = SimulatedRequest(episode.turns[number], context, prefix, session, began=lambda: self._began(playing))
        self._jobs[job] = (playing, episode, number, home)
        if number:
            self._count(home.engine, 1)
        home.engine.submit(job, self.now)
        self._expect(home.engine)

    def _began(self, playing: GroupInFlight) -> None:
        if playing.born < 0:
            playing.born = self._buffer.version

    def _written(self, job: SimulatedRequest) -> None:
        playing, episode, number, home = self._jobs.pop(job)
        home.first_turns -= number == 0
        if number or not home.first_turns:
            self._count(home.engine, -1)
        if number + 1 < len(episode.turns):
            context = job.context + job.tokens
            turn = partial(self._turn, playing, episode, number + 1, context, home)
            self._at(self.now + episode.seconds[number], lambda: self._send(turn))
        else:
            self._ended(playing)
        if self._draining and not self._jobs:
            self._draining = False
            self._publish()

    def _ended(self, playing: GroupInFlight) -> None:
        playing.left -= 1
        if playing.left:
            return
        self._in_play -= len(playing.episodes)
        if self._window:
            self._window.end(len(playing.episodes))
        ticket, tokens = playing.ticket, round(sum(one.tokens for one in playing.episodes))
        if not playing.accepted:
            self._buffer.reject(ticket, "not_accepted", tokens=tokens)
            return
        group = SimulatedGroup(ticket.uid, ticket.slot, [], [], "", tokens=tokens, born=playing.born)
        self._buffer.commit(ticket, group)

    def _observe(self) -> None:
        assert self._window
        self._at(self.now + self.setting.observe_every, self._observe)
        if self._held is None:
            needed, self._needed = self._needed, 0.0
            loads = [
                Load(one.running, one.waiting, one.used, one.shape.kv_tokens, one.prefilled, one.prefill_seconds)
                for one, requests in zip(self._engines, self._open, strict=True)
                if requests < math.inf
            ]
            self._window.observe(loads, self.setting.observe_every, needed)

    # -- the trainer ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self._training:
            return
        (start, end), step = part_of(self.workload.batch_groups, self._part, self.setting.parts), self._buffer.step
        if (groups := self._buffer.take(end - start)) is None:
            return
        self._training, self._part = True, self._part + 1
        last = self._part == self.setting.parts
        self.staleness += [step - group.born for group in groups if isinstance(group, SimulatedGroup)]
        tokens = sum(group.num_tokens for group in groups)
        seconds = tokens / self.setting.train_rate + (self.setting.train_fixed if last else 0.0)
        self._waited |= self.now > self._asked_at
        if self._window and last:
            self._window.taken(self._buffer.ready, self.workload.batch_groups, waited=self._waited)
            self._waited = False
        self._at(self.now + seconds, lambda: self._part_done(tokens, seconds, last=last))

    def _part_done(self, tokens: float, seconds: float, *, last: bool) -> None:
        self._trained += tokens
        self._busy += seconds
        self._publish_waits = last and self._held is not None  # for the publish before
        if not last:
            self._ask(self._part)
        elif not self._publish_waits:
            self._begin_publish()

    def _ask(self, part: int) -> None:
        self._training, self._part, self._asked_at = False, part, self.now

    def _begin_publish(self) -> None:
        self._held = []
        if self.setting.overlap:
            self._ask(0)
        self._draining = self.setting.drain and bool(self._jobs)
        if not self._draining:
            self._publish()

    def _publish(self) -> None:
        for engine in self._engines:
            engine.pause(self.now)
            self._expect(engine)
        self._at(self.now + self.setting.pause, self._published)

    def _published(self) -> None:
        for engine in self._engines:
            engine.resume(self.now)
            self._expect(engine)
        if not self.setting.overlap:
            self._ask(0)
        elif self._publish_waits:
            self._publish_waits = False
            self._at(self.now, self._begin_publish)
        self._buffer.publish(self._buffer.version + 1)
        held, self._held = self._held or [], None
        for request in held:
            request()
