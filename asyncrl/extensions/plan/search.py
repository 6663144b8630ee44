"""Search for the split of GPUs between engines and trainer, lead, bound and concurrency: all by the laws, the best few
in the simulation, under several seeds. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import LengthSample, Prediction, predict
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload, SimulationResult, simulate

NEAR = 0.02
"""Difference in throughput below which the plan with less staleness is preferred."""
FULL = 1.25
"""Requests in flight, relative to what full batches of the engines take, that keep the batches full."""
EPISODES = 200_000
"""Episodes of a simulation beyond which it is not made longer; with twice as many there is none."""
LAW_ERROR = 0.13
"""Difference between laws and simulation that a tenth of random settings exceeds (results/plans.md)."""
CHANGES = (0.75, 1.33)
"""Factors by which inputs are changed to see what depends on them."""
CONTENDERS = 8
"""Number of splits that are compared under changed inputs."""
BOUNDS = (0, 1, 2, 4, 8, 16, 32)
"""Values of rollout.max_staleness that are considered."""


@dataclass(frozen=True)
class Choices:
    """Values that are considered."""

    bounds: Sequence[int]
    leads: Sequence[int] = ()
    """Empty: the bound, half of it, and 1."""
    in_play: Sequence[int | None] = ()
    """As in Setting; empty: no limit, and what keeps the engines full."""

    @classmethod
    def up_to(cls, bound: int) -> Choices:
        """Return the choices if only the largest bound is given."""
        return cls(sorted({*(one for one in BOUNDS if one < bound), bound}))


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of engines and trainer, and the speed of both."""

    engines: int
    engine_gpus: int
    trainers: int
    """GPUs of the trainer."""
    shape: EngineShape
    train_rate: float
    """Tokens per second of the whole trainer."""
    train_fixed: float = 0.0
    pause: float = 0.0
    parts: int = 1
    """Parts of a batch, as in Setting."""
    overlap: bool = False
    """Whether batches are trained during publishes, as in Setting; with a lead of 0 there is none to train."""
    colocated: bool = False
    """Whether engines and trainer use the same GPUs in turns."""
    overrides: tuple[str, ...] = ()
    """Further settings of the layout."""
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes on a GPU of the trainer and of an engine, as far as they are known."""
    measured: tuple[str, ...] = ()
    """Which of them a recorded run measured; the others are computed."""

    def setting(self, bound: int, lead: int, in_play: int | None = 0) -> Setting:
        """Return the setting that the laws and the simulation take."""
        return Setting(
            self.engines,
            self.train_rate,
            bound,
            lead,
            train_fixed=self.train_fixed,
            pause=self.pause,
            parts=self.parts,
            overlap=self.overlap and lead > 0,
            in_play=in_play,
            shape=self.shape,
        )


@dataclass(frozen=True)
class Candidate:
    """A split with a setting, what the laws say about it, and its simulations."""

    split: GpuSplit
    setting: Setting
    law: Prediction
    batch_groups: int
    siblings: int
    simulated: Sequence[SimulationResult] = ()
    """One for each seed."""

    @property
    def batch(self) -> int:
        """Return the episodes of a batch."""
        return self.batch_groups * self.siblings

    @property
    def rates(self) -> list[float]:
        """Return the episodes per second of each simulation, or of the laws if there is none."""
        return [self.batch / one.step for one in self.simulated] or [self.law.samples_per_s]

    @property
    def rate(self) -> float:
        """Return the expected episodes per second."""
        return statistics.fmean(self.rates)

    @property
    def spread(self) -> float:
        """Return the standard deviation over seeds, as a fraction."""
        return statistics.stdev(self.rates) / self.rate if len(self.rates) > 1 else 0.0

    @property
    def law_error(self) -> float:
        """Return how far the laws are off the simulation, as a fraction."""
        return self.law.samples_per_s / self.rate - 1

    @property
    def staleness(self) -> float:
        """Return the expected mean staleness."""
        simulated = [one.staleness_mean for one in self.simulated]
        return statistics.fmean(simulated) if simulated else self.law.staleness


@dataclass(frozen=True)
class ChangedInput:
    """What the laws say if an input is wrong by a factor."""

    name: str
    factor: float
    rate: float
    """Episodes per second of the plan."""
    better: GpuSplit | None
    """A split that is then faster by more than NEAR."""
    better_rate: float


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    best: Candidate
    others: Sequence[Candidate]
    colocated: Candidate | None
    """The synchronous run on the same GPUs in turns."""
    laws: Sequence[Candidate]
    """All splits and settings, by the laws alone."""
    more_engine: float
    """Episodes per second that one more GPU of engines adds, by the laws."""
    more_trainer: float
    enough: tuple[int, int]
    """Engines and trainer GPUs that give all but NEAR of the throughput, by the laws."""
    changed: Sequence[ChangedInput]

    @property
    def synchronous(self) -> bool:
        """Return whether the colocated synchronous run is at least as fast, but for NEAR: it is on-policy."""
        return self.colocated is not None and self.colocated.rate >= (1 - NEAR) * self.best.rate

    @property
    def doubt(self) -> float:
        """Return the difference between two plans, as a fraction, below which neither is known to be faster."""
        if not self.best.simulated:
            return LAW_ERROR
        return self.best.spread + (self.colocated.spread if self.colocated else 0.0) + abs(self.best.law_error)


def search(
    splits: Sequence[GpuSplit],
    workload: Callable[[int], SimulatedWorkload],
    choices: Choices,
    *,
    few: int = 4,
    seeds: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Search all splits and settings; `workload` returns the workload of a seed. The best `few` are simulated (0:
    none), and `say` is told so. At least one split is not colocated."""
    first = workload(0)
    sample = LengthSample.of(first.episodes)

    def weigh(split: GpuSplit, setting: Setting, lengths: LengthSample = sample) -> Candidate:
        law = predict(lengths, first, setting)
        return Candidate(split, setting, law, first.batch_groups, sample.tokens.shape[1])

    def play(candidate: Candidate) -> Candidate:
        steps, warm = _steps(candidate)
        if (candidate.setting.max_staleness + steps + warm) * candidate.batch > 2 * EPISODES:
            return candidate
        runs = [simulate(workload(seed), candidate.setting, steps, warm) for seed in range(seeds)]
        return replace(candidate, simulated=runs)

    say(f"weighing {len(splits)} splits by the laws")
    apart = [
        weigh(split, setting)
        for split in splits
        if not split.colocated
        for setting in _settings(split, choices, first, sample)
    ]
    firsts: dict[tuple[int, int, int], Candidate] = {}  # the best setting of each split
    for one in _ranked(apart):
        firsts.setdefault((one.split.engine_gpus, one.split.engines, one.split.trainers), one)
    turns = [weigh(split, split.setting(0, 0)) for split in splits if split.colocated]
    colocated = max(turns, key=lambda one: one.rate, default=None)
    tried = list(firsts.values())[: few or 4]
    if few:
        count = len(tried) + (colocated is not None)
        for number, one in enumerate(tried):
            say(f"simulating plan {number + 1} of {count}")
            tried[number] = play(one)
        if colocated:
            say(f"simulating plan {count} of {count}")
            colocated = play(colocated)
    best, *others = _ranked(tried)
    more = _more(best, weigh)
    changed = _changed(best, list(firsts.values())[:CONTENDERS], sample, weigh)
    return Plan(best, others, colocated, apart, *more, _enough(best, weigh), list(changed))


def _steps(candidate: Candidate) -> tuple[int, int]:
    """Return the number of steps of a simulation, and of those before them."""
    budget, warm = EPISODES // candidate.batch, 2 + 2 * candidate.setting.max_staleness
    warm = min(warm, max(2, budget // 2))
    return max(4, min(6 + warm, budget - warm)), warm


def in_play(running_groups: int | str | None, siblings: int) -> int | None:
    """Return rollout.max_running_groups as Setting.in_play."""
    if isinstance(running_groups, int):
        return running_groups * siblings
    return None if running_groups == "auto" else 0


def _settings(split: GpuSplit, choices: Choices, first: SimulatedWorkload, sample: LengthSample) -> Iterator[Setting]:
    """Yield bounds, leads and limits of concurrency."""
    siblings = sample.tokens.shape[1]
    full = math.ceil(FULL * split.engines * split.shape.max_running / sample.kappa / siblings)
    for bound in choices.bounds:
        for lead in choices.leads or sorted({bound, math.ceil(bound / 2), min(1, bound)}):
            limits = (0, full * siblings) if full < lead * first.batch_groups else (0,)
            for limit in choices.in_play or limits:
                yield split.setting(bound, lead, limit)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort by throughput; first those within NEAR of the fastest, by staleness."""
    near = (1 - NEAR) * max(one.rate for one in candidates)

    def key(one: Candidate) -> tuple[bool, float, float, float]:
        if one.rate < near:
            return True, -one.rate, 0, 0
        return False, round(one.staleness, 1), one.setting.max_staleness, -one.rate

    return sorted(candidates, key=key)


Weigh = Callable[..., Candidate]


def _more(best: Candidate, weigh: Weigh) -> tuple[float, float]:
    """Return what one more GPU of engines and one more of the trainer add, by the laws."""
    split, setting, now = best.split, best.setting, best.law.samples_per_s
    engines = weigh(split, replace(setting, engines=split.engines + 1)).rate
    trainer = weigh(split, replace(setting, train_rate=split.train_rate * (1 + 1 / split.trainers))).rate
    return (engines - now) / split.engine_gpus, trainer - now


def _enough(best: Candidate, weigh: Weigh) -> tuple[int, int]:
    """Return the fewest engines, and then the fewest GPUs of the trainer, that give all but NEAR of the throughput."""
    split, setting, least = best.split, best.setting, (1 - NEAR) * best.law.samples_per_s

    def fewest(most: int, of: Callable[[int], Setting]) -> int:
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if weigh(split, of(middle)).rate >= least else (middle, high)
        return high

    engines = fewest(split.engines, lambda count: replace(setting, engines=count))
    each = split.train_rate / split.trainers
    return engines, fewest(split.trainers, lambda gpus: replace(setting, engines=engines, train_rate=each * gpus))


def _changed(
    best: Candidate, contenders: Sequence[Candidate], sample: LengthSample, weigh: Weigh
) -> Iterator[ChangedInput]:
    """Yield what the laws say of the plan and of other splits with inputs changed by CHANGES."""

    def faster_engines(setting: Setting, by: float) -> Setting:
        shape = setting.shape
        token, request, prefill = shape.per_token / by, shape.per_request / by, shape.prefill_rate * by
        faster = replace(shape, per_token=token, per_request=request, prefill_rate=prefill)
        return replace(setting, shape=faster)

    def faster_trainer(setting: Setting, by: float) -> Setting:
        return replace(setting, train_rate=setting.train_rate * by, train_fixed=setting.train_fixed / by)

    for factor in CHANGES:
        longer = replace(sample, tokens=sample.tokens * factor)
        for name, change, lengths in (
            ("length of answers", lambda setting, by: setting, longer),
            ("speed of engines", faster_engines, sample),
            ("speed of the trainer", faster_trainer, sample),
        ):
            own = weigh(best.split, change(best.setting, factor), lengths).rate
            others = [weigh(one.split, change(one.setting, factor), lengths) for one in contenders]
            most = max(others, key=lambda one: one.rate)
            better = most.split if most.rate > (1 + NEAR) * own and most.split != best.split else None
            yield ChangedInput(name, factor, own, better, most.rate)
