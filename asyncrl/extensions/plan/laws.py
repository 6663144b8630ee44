"""Throughput of a run in closed form: the laws that limit it, and which of them binds. Pure.

    trainer       S >= tokens / rate + fixed + pause                       S: seconds per step
                  S >= tokens / rate + fixed                               with weights.overlap
    engines       tokens/s <= engines * C / (per_token + per_request * C)  C: requests that a batch holds
    concurrency   X * E[longest of a group] <= batch * (lead + 1/2 - u)    X: episodes/s, u: trainer's busy fraction
    order         step t waits for the longest episode of cohort t - slack

All times of episodes are L * T + Z: L tokens of T seconds each, Z seconds in environments. T follows from Little's law
in an engine: b = rate * T requests are in the batch, and T = per_token + per_request * b.

The concurrency law is Little's law in a closed network (J. Little, Operations Research 9(3), 1961) under the rule of
rollout/buffer.py: when a batch is taken, `lead` batches of groups are with the engines; a publish adds one, and none is
added while the trainer is busy. The mean over a step is lead + 1/2 - u batches. A group holds its place until its
longest sibling ends, so only E[L] / E[max of a group] of the places generate. The order law is the recursion

    publish(t) = max(publish(t - 1) + train, publish(t - slack - lead - 1) + M(t - slack) + last) + pause

whose M are maxima of residences over random cohorts, and last is the part of training that needs them: all of it, or
one of trainer.batch_parts. At lead 0 it is the synchronous step. With weights.overlap the trainer is free before
publish(t - 1), when it has trained that batch, and publish(t) begins after publish(t - 1).

Siblings share the prefill of their prompt, unless the cache limits the batch: then it has no room to keep prompts, and
each sibling prefills its own.

Left out: variation of the batch within a step, routing that is uneven, what engines with full caches generate less
because they retract requests, and the time of router and client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload

COHORTS, DRAWS = 256, 1 << 16
"""Number of random cohorts of which the order law takes maxima; fewer if they would hold more groups than DRAWS."""
HALVINGS, CLOSE = 24, 1 + 1e-6
"""Steps and tolerance of the search for the throughput at which a law binds."""


@dataclass(frozen=True, eq=False)
class LengthSample:
    """Tokens and environment seconds of episodes, in arrays of groups by siblings."""

    tokens: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    turns: float = 1.0
    """Mean number of turns of an episode."""

    @classmethod
    def of(cls, episodes: Callable[[int], Sequence[SimulatedEpisode]], groups: int = 512) -> LengthSample:
        """Draw the first groups of a workload."""
        drawn = [episodes(number) for number in range(groups)]
        return cls(
            np.array([[one.tokens for one in group] for group in drawn], float),
            np.array([[sum(one.seconds) for one in group] for group in drawn], float),
            float(np.mean([len(one.turns) for group in drawn for one in group])),
        )

    @property
    def mean(self) -> float:
        """Return the mean tokens of an episode."""
        return float(self.tokens.mean())

    @property
    def kappa(self) -> float:
        """Return the mean tokens of an episode over those of the longest of its group."""
        return self.mean / float(self.tokens.max(1).mean())

    @cached_property
    def live(self) -> float:
        """Return the mean tokens that an episode has generated at a random time of its generation."""
        return float((self.tokens**2).mean()) / (2 * self.mean)


@dataclass(frozen=True)
class Prediction:
    """What the laws say about a setting."""

    samples_per_s: float
    tokens_per_s: float
    trainer_busy: float
    engines_busy: float
    """Fraction of the throughput with full batches."""
    staleness: float
    """Mean number of versions between the start of a group and its training."""
    binds: str
    """Law that limits the throughput."""
    limits: dict[str, float]
    """Episodes per second that each law allows; inf for concurrency or order that allow what the others do."""


def predict(sample: LengthSample, workload: SimulatedWorkload, setting: Setting) -> Prediction:
    """Return what the laws say. Of the workload, only the batch and the prompt are used; `sample` has the lengths."""
    laws = _Laws(sample, workload, setting)
    limits = laws.limits()
    binds = min(limits, key=limits.__getitem__)
    rate = limits[binds]
    tokens = rate * sample.mean
    return Prediction(
        rate,
        tokens,
        rate / laws.batch * laws.train,
        tokens / engines_bound(setting.engines, setting.shape),
        laws.staleness(rate, binds),
        binds,
        limits,
    )


class _Laws:
    def __init__(self, sample: LengthSample, workload: SimulatedWorkload, setting: Setting) -> None:
        self.sample, self.setting, self.siblings = sample, setting, sample.tokens.shape[1]
        self.batch = workload.batch_groups * self.siblings
        self.lead = setting.max_staleness if setting.lead is None else setting.lead
        self.slack = setting.max_staleness - self.lead if self.lead else 0  # nothing else is ready at lead 0
        self.train = self.batch * sample.mean / setting.train_rate + setting.train_fixed
        self.held = self.train + setting.pause  # from a batch to the next admission
        self.step = self.train if setting.overlap else self.held
        self.last = (self.train - setting.train_fixed) / setting.parts + setting.train_fixed
        fits = setting.shape.kv_tokens / (workload.prompt + sample.live)
        self.shape = replace(setting.shape, max_running=max(1, int(min(setting.shape.max_running, fits))))
        alike = self.siblings if fits >= setting.shape.max_running else 1  # a full cache keeps no prompt for siblings
        self.prefill = workload.prompt / alike / setting.engines / setting.shape.prefill_rate
        cohorts = max(32, min(COHORTS, DRAWS // workload.batch_groups))
        drawn = np.random.default_rng(0).integers(sample.tokens.shape[0], size=cohorts * workload.batch_groups)
        self._cohorts = drawn.reshape(cohorts, workload.batch_groups)

    def limits(self) -> dict[str, float]:
        """Return the episodes per second that each law allows. How far concurrency and order are beyond trainer and
        engines is not evaluated."""
        mean, engines = self.sample.mean, self.setting.engines
        trainer = (
            trainer_bound(
                self.setting.train_rate, self.step - self.batch * mean / self.setting.train_rate, self.batch * mean
            )
            / mean
        )
        full = self.shape.rate(self.shape.max_running)
        most = engines_bound(engines, self.shape) / mean
        limits = {"trainer": trainer, "engines": _largest(lambda rate: self._load(rate) <= full * CLOSE, most)}
        most = min(limits.values())
        if self.lead:
            limits["concurrency"] = _largest(self._enough_in_play, most, beyond=math.inf)
        ordered = _largest(lambda rate: self._ordered_step(rate) <= self.batch / rate * CLOSE, most, beyond=math.inf)
        return limits | {"order": ordered}

    def staleness(self, rate: float, binds: str) -> float:
        """Return the lead, less the batches of groups that are admitted and wait for an engine; at least what it takes
        to generate a group, and to fill a batch."""
        longest = rate * float(self._residences(rate).max(1).mean())
        waiting = self._outstanding(rate) - longest if binds == "engines" else 0.0
        if self.setting.in_play:
            waiting = max(waiting, self._outstanding(rate) - self.setting.in_play) if binds != "trainer" else waiting
        least = min(self.lead, longest / self.batch + 0.5)
        return max(least, self.lead - max(0.0, waiting) / self.batch)

    def _available(self, rate: float) -> float:
        """Return the fraction of time for which an engine decodes: not paused, and not prefilling."""
        return max(1e-9, (1 - self.setting.pause * rate / self.batch) * (1 - rate * self.prefill))

    def _load(self, rate: float) -> float:
        """Return the tokens per second that an engine must decode."""
        return rate * self.sample.mean / self.setting.engines / self._available(rate)

    def _token_time(self, rate: float) -> float:
        """Return the mean seconds of a token."""
        if not self.lead:
            return self._synchronous
        busy = min(self._load(rate), self.shape.rate(self.shape.max_running))
        return self.shape.per_token / (1 - self.shape.per_request * busy) / self._available(rate)

    @cached_property
    def _synchronous(self) -> float:
        """Return the mean seconds of a token at lead 0, where the batch shrinks until the longest episode ends."""
        tokens, time = self.batch * self.sample.mean / self.setting.engines, self.shape.per_token
        for _ in range(HALVINGS):
            longest = float(self._longest(self.sample.tokens * time + self.sample.seconds).mean())
            running = min(tokens * time / longest, self.shape.max_running)
            time = self.shape.per_token + self.shape.per_request * running
        return time

    def _residences(self, rate: float) -> np.ndarray[Any, Any]:
        return self.sample.tokens * self._token_time(rate) + self.sample.seconds

    def _outstanding(self, rate: float) -> float:
        """Return the mean number of episodes of groups that are admitted and not taken."""
        return self.batch * (self.lead + 0.5 - rate * self.held / self.batch)

    def _enough_in_play(self, rate: float) -> bool:
        places = min(self._outstanding(rate), self.setting.in_play or math.inf)
        return rate * float(self._residences(rate).max(1).mean()) <= places

    def _longest(self, of_episodes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return of_episodes.max(1)[self._cohorts].max(1)

    def _ordered_step(self, rate: float) -> float:
        """Return the mean seconds of a step by the recursion above."""
        longest = self._longest(self._residences(rate)) + self._burst(rate)
        if not self.lead:
            full = self.batch * self.sample.mean / engines_bound(self.setting.engines, self.shape)
            longest = np.maximum(longest, full) + self.batch * self.prefill
        back = self.slack + self.lead + 1
        trained, published = 0.0, [0.0] * back
        for seconds in longest.tolist():
            free = trained if self.setting.overlap else published[-1]
            trained = max(free + self.train, published[-back] + seconds + self.last)
            published.append(max(trained, published[-1]) + self.setting.pause)
        warm = min(back, len(longest) // 4)
        return (published[-1] - published[back + warm - 1]) / (len(longest) - warm)

    def _burst(self, rate: float) -> float:
        """Return the mean seconds that a request of a cohort waits because all of the cohort start at once."""
        most, older = self.shape.max_running, self._load(rate) * self._token_time(rate) * self.lead / (self.lead + 1)
        excess = self.batch / self.setting.engines + older - most
        return max(0.0, excess) / 2 * self.sample.mean / self.sample.turns / self.shape.rate(most)


def _largest(holds: Callable[[float], bool], most: float, beyond: float = 0.0) -> float:
    """Return the largest rate up to `most` for which a condition holds that holds below it. If it holds at `most`, that
    or `beyond`, if larger, is returned."""
    if holds(most):
        return max(most, beyond)
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high if low == 0 else low


# -- upper bounds -------------------------------------------------------------------------------------------------


def trainer_bound(rate: float, fixed: float, batch_tokens: float) -> float:
    """Return the tokens per second of a trainer that never waits."""
    return batch_tokens / (batch_tokens / rate + fixed)


def engines_bound(engines: int, shape: EngineShape) -> float:
    """Return the tokens per second of engines whose batches are always full."""
    return engines * shape.rate(shape.max_running)


def bottleneck_bound(
    devices: int, shape: EngineShape, rate_per_device: float, fixed: float, batch_tokens: float
) -> tuple[float, int]:
    """Return the tokens per second that no asynchronous run on this many devices can exceed, and the number of engines
    that attains it. Each device is either an engine or part of the trainer."""
    return max(
        (
            min(
                engines_bound(engines, shape),
                trainer_bound(rate_per_device * (devices - engines), fixed, batch_tokens),
            ),
            engines,
        )
        for engines in range(1, devices)
    )
