"""Decisions about a run in progress: more or fewer engines, another lead, another number of groups at once.

    measure   the trainer's speed is that of the latest steps, lengths are those of the latest groups, and the engines'
              speed is scaled until the laws (laws.py) give the throughput that was measured: of the engines, where they
              fall behind a trainer that still trains what was ready before (elastic_window.py)
    compare   the laws predict the throughput of every neighbouring setting; if lengths grow, with those that are
              expected when another change could have taken effect, and for a trainer that is HEADROOM faster, because
              the laws promise more than engines do whose caches are full
    decide    a change is made when it was the best one for `patience` steps in a row
    rest      then nothing is decided until it has taken effect, and for as many steps

A change pays if it gains MARGIN. An engine is given back, or the lead lowered, if the trainer would remain the limit
even if it were HEADROOM faster, and lengths grew for TREND further steps as they do; the lead only if they do not grow.
Both cannot be true of neighbouring settings, so that decisions end under a constant load. Under noise, patience doubles
each time a field turns round: n steps see about log2(n / PATIENCE) turns at most.

Pure: no I/O, and no clock but the times of the observations.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.extensions.plan.elastic_window import TREND, StepObservation, StepWindow
from asyncrl.extensions.plan.laws import LengthSample, Prediction, predict
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload

MARGIN, HEADROOM = 0.03, 0.15
"""Least gain of a change; how much faster the trainer could be before an engine that is given back would be missed, and
for how much faster a trainer engines are added while lengths grow."""
SLIGHT = 0.02
"""Share of a step for which the trainer may wait and still counts as never waiting."""
PATIENCE = 3
"""Steps in a row for which a change must pay, at first."""
AHEAD = 3
"""Times the pipeline turns over until another change could have taken effect: once until this one is measured, once for
the steps that must agree and for engines that join, and once until batches are trained that they generated."""
GROUPS, MOST_GROUPS = 96, 1024
"""Number of latest groups whose lengths are used, at least and at most; two batches in between."""
PRIOR = 8
"""Number of steps for which the engines' speed at the last change counts when it is measured again."""
PAYBACK = 20
"""Number of steps within which a change must have gained what it costs."""
CONCURRENCY_STEPS = (1.25, 2.0)
"""Factors by which a limit of concurrency changes at once."""
_NONE = (("", 0), 0)  # the best change and for how many steps: none
SLOWEST = 8.0
"""Largest factor by which the engines' speed may differ from what is expected."""

ACTIONS = {
    ("engines", 1): "add_engine",
    ("engines", -1): "remove_engine",
    ("lead", 1): "raise_lead",
    ("lead", -1): "lower_lead",
    ("in_play", 1): "raise_concurrency",
    ("in_play", -1): "lower_concurrency",
}


@dataclass(frozen=True)
class ElasticLimits:
    """What may change."""

    min_engines: int
    max_engines: int
    unit: int = 1
    """Number of engines that are added or removed at once."""
    devices: int = 0
    """Number of engines that all GPUs could hold, if an engine's GPUs come from the trainer and go back to it; 0: the
    trainer keeps its GPUs."""
    move_seconds: float = 0.0
    """Seconds for which the trainer stands still when it gives or gets GPUs."""
    settle_seconds: float = 600.0
    """Seconds after which an engine that was added and has not joined is given up."""

    def with_engines(self, setting: Setting, engines: int) -> Setting:
        """Return the setting with another number of engines, and the trainer with the GPUs that are left."""
        part = (self.devices - engines) / (self.devices - setting.engines) if self.devices else 1.0
        return replace(setting, engines=engines, train_rate=setting.train_rate * part)


@dataclass(frozen=True)
class ElasticDecision:
    """A change, and why it pays."""

    step: int
    time: float
    action: str
    before: float
    after: float
    binds: str
    """Law that limits the run as it is."""
    gain: float
    """Expected gain of throughput, as a fraction."""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Return the decision as a sentence."""
        figures = self.figures
        what = f"{self.action.replace('_', ' ')}: {self.before:g} -> {self.after:g}"
        gain = f"expected {self.gain:+.0%}" if abs(self.gain) >= 0.005 else "at no loss"
        waits = f"the trainer waits {figures['trainer_waits']:.0%} of the time"
        made, growth = figures["batches_made"], figures["length_growth"]
        behind = f", the engines make {made:.0%} of what is trained" if made < 0.995 else ""
        grow = f", {growth:+.1%} per step" if growth >= 0.0005 else ""
        length = f"an episode has {figures['length']:.0f} tokens{grow}"
        return f"{what}, {gain}; the {self.binds} law binds, {waits}{behind}, {length}"


class ElasticController:
    """Observes steps and returns decisions."""

    def __init__(
        self,
        setting: Setting,
        batch_groups: int,
        limits: ElasticLimits,
        *,
        prompt: float = 0.0,
        acts: bool = True,
        laws: Callable[[LengthSample, SimulatedWorkload, Setting], Prediction] = predict,
    ) -> None:
        """`setting` is the run as it starts; its speeds are expectations until steps were measured. Unless the
        controller `acts`, no decision changes the setting."""
        self.setting, self._limits, self._acts, self._laws = setting, limits, acts, laws
        if setting.lead is None:
            self.setting = replace(setting, lead=setting.max_staleness)
        self._workload = SimulatedWorkload(_no_episodes, batch_groups, prompt)
        self._steps = StepWindow()
        self._groups: deque[Sequence[tuple[float, float]]] = deque(
            maxlen=min(MOST_GROUPS, max(GROUPS, 2 * batch_groups))
        )
        self._slowness = self._slowness_before = 1.0  # of the engines, against the shape; at the last change
        self._turns: Counter[str] = Counter()  # by field: how often decisions turned round
        self._last: dict[str, int] = {}  # by field: direction of the last decision
        self._streak = _NONE
        self._cycle = 1 + setting.max_staleness  # a straggler's wait is followed by as many steps without any
        self._rest = 2 * self._cycle  # the pipeline fills first
        self._deadline = 0.0
        self._advised: tuple[str, float] = ("", 0.0)
        self.law: Prediction | None = None
        """What the laws say of the run as it is."""

    def observe(self, seen: StepObservation) -> ElasticDecision | None:
        """Record a step. Return a decision, which the caller carries out, or None."""
        self._groups.extend(seen.groups)
        if self._rest <= self._cycle:  # short answers end before others
            self._steps.add_lengths(seen)
        if seen.shape:
            self.setting = replace(self.setting, shape=seen.shape)
        if seen.lead is not None:
            self.setting = replace(self.setting, lead=seen.lead)
        if seen.engines != self.setting.engines:
            if seen.time < self._deadline:
                return None
            self._begin_anew(seen.engines)
        if self._rest <= self._cycle:
            self._steps.add(seen)
        self._rest -= 1
        if self._steps.prompt is not None:
            self._workload = replace(self._workload, prompt=self._steps.prompt)
        sample = self._sample() if self._rest <= 0 else None
        if sample is None:
            return None
        now = self._measured(sample)
        self.law = self._predicted(sample, now)
        found = self._best(sample, now, self.law)
        if found is None:
            self._streak = _NONE
            return None
        return self._decided(seen, sample, self.law, *found)

    # -- measuring -----------------------------------------------------------------------------------------

    def _begin_anew(self, engines: int) -> None:
        """Forget the steps measured with another number of engines."""
        self.setting = self._limits.with_engines(self.setting, engines)
        self._measure_anew()

    def _measure_anew(self) -> None:
        self._steps.clear()
        self._rest, self._streak, self._slowness_before = self._cycle, _NONE, self._slowness

    def _sample(self) -> LengthSample | None:
        """Return the lengths of the latest groups of the most frequent size; None if there are too few."""
        sizes = Counter(map(len, self._groups))
        size = max(sizes, key=lambda one: (sizes[one], one), default=0)
        rows = [group for group in self._groups if len(group) == size]
        if not size or len(rows) < min(16, self._workload.batch_groups):
            return None
        values = np.array(rows, float)
        return LengthSample(np.maximum(values[:, :, 0], 1.0), values[:, :, 1], self._steps.turns)

    def _measured(self, sample: LengthSample) -> Setting:
        """Return the setting with the speeds of the latest steps."""
        now, steps = self.setting, self._steps
        busy = sum(one.seconds - one.waited - (0.0 if now.overlap else one.paused) for one in steps)
        expected = sum(one.tokens / now.train_rate + now.train_fixed for one in steps)
        slower = max(busy, 1e-9) / expected
        pause = sum(one.paused for one in steps) / len(steps)
        self.setting = replace(
            now, train_rate=now.train_rate / slower, train_fixed=now.train_fixed * slower, pause=pause
        )
        rate = steps.made * sum(one.tokens for one in steps) / steps.seconds / sample.mean
        weight = len(steps) / (len(steps) + PRIOR)
        self._slowness = self._scaled(sample, rate) ** weight * self._slowness_before ** (1 - weight)
        return self._slowed(self._slowness)

    def _slowed(self, factor: float) -> Setting:
        shape = self.setting.shape
        token, request = shape.per_token * factor, shape.per_request * factor
        return replace(self.setting, shape=replace(shape, per_token=token, per_request=request))

    def _predicted(self, sample: LengthSample, setting: Setting) -> Prediction:
        """Return what the laws say of a setting."""
        return self._laws(sample, self._workload, setting)

    def _scaled(self, sample: LengthSample, rate: float) -> float:
        """Return the largest slowness at which the laws give this many episodes per second. If the trainer lacks
        nothing, that is only an upper bound, below which the engines count as fast as their episodes say."""

        def given(factor: float) -> Prediction:
            return self._predicted(sample, self._slowed(factor))

        rate = min(rate, (1 - SLIGHT) * given(1.0).limits["trainer"])
        low, high = 1 / SLOWEST, SLOWEST
        for _ in range(12):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if given(middle).samples_per_s >= rate else (low, middle)
        return low if self._steps.lacks > SLIGHT else min(1.0, low)

    # -- choosing ------------------------------------------------------------------------------------------

    def _neighbours(self, now: Setting) -> Iterator[tuple[str, int, Setting]]:
        """Yield neighbouring settings: the field that changes, the direction, and the setting."""
        assert now.lead is not None
        step = self._limits.unit
        while step <= max(self._limits.unit, now.engines):
            for sign in (1, -1):
                engines = now.engines + sign * step
                if self._limits.min_engines <= engines <= self._limits.max_engines:
                    yield "engines", sign, self._limits.with_engines(now, engines)
            step *= 2
        for sign in (1, -1):
            if 1 <= now.lead + sign <= now.max_staleness:
                yield "lead", sign, replace(now, lead=now.lead + sign)
            for factor in CONCURRENCY_STEPS if now.in_play else ():
                yield "in_play", sign, replace(now, in_play=max(1, round((now.in_play or 0) * factor**sign)))

    def _best(self, sample: LengthSample, now: Setting, law: Prediction) -> tuple[str, int, Setting, float] | None:
        """Return the best change: field, direction, setting and gain. One that needs no GPU comes first, and of those
        that are about as good, the smallest."""
        gains, savings, steps = [], [], self._steps
        grow = steps.growth > 0
        later, far = steps.grown(sample, AHEAD * self._cycle), steps.grown(sample, TREND)
        law_later = self._predicted(later, _faster(now)) if grow else law
        for name, sign, other in self._neighbours(now):
            now_gained = self._predicted(sample, other).samples_per_s / law.samples_per_s - 1
            gain = (
                self._predicted(later, _faster(other)).samples_per_s / law_later.samples_per_s - 1
                if grow
                else now_gained
            )
            if other.train_rate <= now.train_rate:  # all that can be gained now is the trainer's waiting
                gain -= max(0.0, now_gained - steps.lacks / max(1e-9, 1 - steps.lacks))
            moved = name == "engines" and self._limits.devices > 0
            cost = self._limits.move_seconds * law.samples_per_s / (self._batch(sample) * PAYBACK) if moved else 0.0
            if gain - cost > MARGIN:
                gains.append((name, sign, other, gain))
            elif sign < 0 and not moved and not (name == "lead" and grow) and self._spare(far, other):
                savings.append((name, sign, other, min(0.0, gain)))
        if gains:
            gains = [one for one in gains if one[0] in ("lead", "in_play")] or gains
            most = max(gain for *_, gain in gains)
            return next(one for one in gains if one[3] > most - SLIGHT)
        return savings[0] if savings else None

    def _batch(self, sample: LengthSample) -> int:
        return self._workload.batch_groups * sample.tokens.shape[1]

    def _spare(self, sample: LengthSample, other: Setting) -> bool:
        """Return whether the trainer would limit a setting even if it were faster, and lacks nothing now."""
        if self._steps.lacks > SLIGHT or not self._steps.trend_known:
            return False
        return self._predicted(sample, _faster(other)).binds == "trainer"

    # -- deciding ------------------------------------------------------------------------------------------

    def _decided(
        self,
        seen: StepObservation,
        sample: LengthSample,
        law: Prediction,
        name: str,
        sign: int,
        other: Setting,
        gain: float,
    ) -> ElasticDecision | None:
        """Count the best change, and decide for it once it was the best often enough."""
        before, count = self._streak
        count = count + 1 if before == (name, sign) else 1
        self._streak = (name, sign), count
        turns = self._turns[name] + (self._last.get(name, sign) != sign)
        if count < PATIENCE * 2**turns:
            return None
        change = float(getattr(self.setting, name)), float(getattr(other, name))
        figures = self._figures(seen, sample, law)
        self._streak = _NONE
        if self._acts:
            self._turns[name], self._last[name] = turns, sign
            changed: dict[str, Any] = {name: getattr(other, name)}
            self.setting = replace(self._limits.with_engines(self.setting, other.engines), **changed)
            self._measure_anew()
            self._deadline = seen.time + self._limits.settle_seconds
        elif self._advised == (name, change[1]):
            return None
        else:
            self._advised = name, change[1]
        return ElasticDecision(seen.step, seen.time, ACTIONS[name, sign], *change, law.binds, gain, figures)

    def _figures(self, seen: StepObservation, sample: LengthSample, law: Prediction) -> dict[str, float]:
        return {
            "step_seconds": seen.seconds,
            "trainer_waits": self._steps.waits,
            "batches_made": self._steps.made,
            "engines_busy": law.engines_busy,
            "samples_per_s": law.samples_per_s,
            "length": sample.mean,
            "length_p90": float(np.quantile(sample.tokens, 0.9)),
            "length_growth": math.expm1(self._steps.growth),
            "engine_slowness": self._slowness,
            "pause": seen.paused,
        }


def _faster(setting: Setting) -> Setting:
    """Return the setting with a trainer that is HEADROOM faster."""
    faster = 1 + HEADROOM
    return replace(setting, train_rate=setting.train_rate * faster, train_fixed=setting.train_fixed / faster)


def _no_episodes(number: int) -> Sequence[SimulatedEpisode]:
    """Return nothing: the laws take lengths from a sample."""
    return ()
