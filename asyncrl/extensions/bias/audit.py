"""Audit of sampling bias: is what is trained a fair sample of what was generated? Long answers are lost first,
silently.

The audit compares lengths, rewards and difficulty (a group's mean reward) of the trained groups with those of all
generated groups. It does so once none of the groups that were admitted at the same version can be trained any more
(rollout.max_staleness): before, it would see their short answers first. When nothing is thrown away the two sets are
the same; accept, oversample, over_age and failures make them differ. For a group that was aborted only the tokens
received so far are known, so its length counts as shorter than it would have been.

The test is the two-sample Kolmogorov-Smirnov test with its asymptotic p-value (Press et al., Numerical Recipes, section
14.3).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from asyncrl import schema
from asyncrl.errors import RecordError
from asyncrl.extension import RolloutHooks
from asyncrl.observability.timeline import BatchTimeline, GroupTimeline, PublishTimeline, Record

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import RolloutRun

WINDOW = 4096
"""Number of the latest trajectories (for difficulty: groups) that are compared."""
ENOUGH = 200
"""Minimum number of values per side; fewer are not compared."""
SURE, MUCH = 0.001, 0.05
"""A drift is reported when its p-value is below the first number and the means differ by more than the second,
relatively.
"""
KINDS = ("length", "reward", "difficulty")


@dataclass
class _Ended:
    """A group that has ended."""

    born: int  # version at which it was admitted
    lengths: list[int]  # tokens of its trajectories
    rewards: list[float]  # none if it was not played to its end
    trained: bool = False


@dataclass
class _Sample:
    """The latest values to compare."""

    length: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    difficulty: list[float] = field(default_factory=list)

    def add(self, group: _Ended) -> None:
        self.length = [*self.length, *group.lengths][-WINDOW:]
        self.reward = [*self.reward, *group.rewards][-WINDOW:]
        if group.rewards:
            self.difficulty = [*self.difficulty, fmean(group.rewards)][-WINDOW:]


@dataclass
class _State:
    """What the audit knows, and what a checkpoint keeps of it."""

    open: dict[str, _Ended] = field(default_factory=dict)  # by uid; others born at the same version may be trained
    generated: _Sample = field(default_factory=_Sample)
    trained: _Sample = field(default_factory=_Sample)
    told: set[str] = field(default_factory=set)  # kinds of drifts that were reported


class Audit(RolloutHooks):
    """Compares generated and trained groups over one run."""

    def __init__(self) -> None:
        self._state = _State()

    def start(self, run: RolloutRun) -> None:
        """Begin."""
        self._bound, self._warn = run.config.rollout.max_staleness, run.warn

    def record(self, record: Record) -> None:
        """Take a group that has ended, and a batch. At a publish, close what cannot be trained any more."""
        match record:
            case GroupTimeline(purpose="training"):
                rewards = [one.reward for one in record.episodes if one.reward is not None]
                lengths = [one.tokens for one in record.episodes]
                self._state.open[record.uid] = _Ended(record.born, lengths, rewards)
            case BatchTimeline():
                for uid in self._state.open.keys() & record.uids:
                    self._state.open[uid].trained = True
            case PublishTimeline():
                self._close(record.version - self._bound)
                self._report()

    def _close(self, below: int) -> None:
        """Close the versions below this one: all batches that groups born then may be in were taken."""
        state = self._state
        for uid in [uid for uid, one in state.open.items() if one.born < below]:
            group = state.open.pop(uid)
            state.generated.add(group)
            if group.trained:
                state.trained.add(group)

    def figures(self) -> dict[str, float]:
        """Return the relative difference between the means of trained and generated groups, by kind."""
        return {f"bias/{kind}": self._difference(kind) for kind in KINDS}

    def state(self) -> bytes:
        """Return the groups that are still open, and the samples."""
        return schema.encode(self._state)

    def restore(self, state: bytes) -> None:
        """Go on from a state."""
        try:
            self._state = msgspec.msgpack.decode(state, type=_State)
        except (msgspec.DecodeError, ValueError) as error:
            raise RecordError(f"the checkpoint's state of the bias audit is damaged: {error}") from None

    def _report(self) -> None:
        """Warn of each drift that has not been reported before."""
        for kind in KINDS:
            generated, trained = self._values(kind)
            if kind in self._state.told or min(len(generated), len(trained)) < ENOUGH:
                continue
            if abs(self._difference(kind)) > MUCH and (p := ks_p_value(generated, trained)) < SURE:
                self._state.told.add(kind)
                self._warn(
                    f"the trained groups are not a fair sample of the generated ones: mean {kind} {fmean(trained):.4g} "
                    f"against {fmean(generated):.4g} ({len(trained)} of {len(generated)}, KS test p = {p:.1g}): "
                    "see the ledger for what was discarded (rollout.accept, oversample, over_age, failures)"
                )

    def _values(self, kind: str) -> tuple[list[float], list[float]]:
        """Return the latest values of one kind, generated and trained."""
        return getattr(self._state.generated, kind), getattr(self._state.trained, kind)

    def _difference(self, kind: str) -> float:
        generated, trained = self._values(kind)
        if not generated or not trained or not fmean(generated):
            return 0.0
        return fmean(trained) / fmean(generated) - 1.0


def ks_p_value(one: list[float], other: list[float]) -> float:
    """Return the probability that two samples of one distribution differ at least as much as these."""
    one, other = sorted(one), sorted(other)
    distance = max(
        abs(bisect_right(one, value) / len(one) - bisect_right(other, value) / len(other)) for value in {*one, *other}
    )
    size = sqrt(len(one) * len(other) / (len(one) + len(other)))
    root = (size + 0.12 + 0.11 / size) * distance
    if root < 0.2:
        return 1.0  # the series does not converge for such small values
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * root) ** 2) for k in range(1, 101))))
