"""Audit of sampling bias: is what is trained a fair sample of what was generated? Long answers are lost first,
silently.

The audit compares lengths, rewards and difficulty (a group's mean reward) of the trained groups with those of all
generated groups, over closed cohorts only: a running cohort would show its short answers first. When nothing is thrown
away the two sets are the same; accept, oversample, over_age and failures make them differ. For a group that was aborted
only the tokens received so far are known, so its length counts as shorter than it would have been.

The test is the two-sample Kolmogorov-Smirnov test with its asymptotic p-value (Press et al., Numerical Recipes, section
14.3). Pure: no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import fmean

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
class _Sample:
    """The values to compare, by kind."""

    values: dict[str, deque[float]] = field(default_factory=lambda: {kind: deque(maxlen=WINDOW) for kind in KINDS})

    def lists(self) -> dict[str, list[float]]:
        return {kind: list(values) for kind, values in self.values.items()}

    def add(self, lengths: list[int], rewards: list[float]) -> None:
        self.values["length"] += lengths
        self.values["reward"] += rewards
        if rewards:
            self.values["difficulty"].append(fmean(rewards))


@dataclass
class AuditState:
    """State of an audit, for a checkpoint."""

    cohorts: dict[int, dict[str, tuple[bool, list[int], list[float]]]]  # open cohorts, by number and group uid
    generated: dict[str, list[float]]
    trained: dict[str, list[float]]
    told: list[str]


class Audit:
    """Compares generated and trained groups over one run."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, tuple[bool, list[int], list[float]]]] = {}  # by cohort and group uid
        self._generated, self._trained = _Sample(), _Sample()
        self._told: set[str] = set()

    def state(self) -> AuditState:
        """Return the state. Serialize it immediately: it shares some of its parts with the audit."""
        return AuditState(self._open, self._generated.lists(), self._trained.lists(), sorted(self._told))

    def restore(self, state: AuditState) -> None:
        """Restore a saved state."""
        self._open, self._told = state.cohorts, set(state.told)
        for sample, values in ((self._generated, state.generated), (self._trained, state.trained)):
            for kind in KINDS:
                sample.values[kind].extend(values[kind])

    def note(self, cohort: int, uid: str, lengths: list[int], rewards: list[float], *, trained: bool) -> None:
        """Record a group that has ended: the tokens and, where known, the rewards of its trajectories."""
        self._open.setdefault(cohort, {})[uid] = trained, lengths, rewards

    def drop(self, uid: str) -> None:
        """Record that a group that was to be trained has lost its place in a batch."""
        for cohort in self._open.values():
            if uid in cohort:
                _, lengths, rewards = cohort[uid]
                cohort[uid] = False, lengths, rewards

    def close(self, below: int) -> None:
        """Close the cohorts below this number: none of their groups can be trained any more."""
        for cohort in sorted(number for number in self._open if number < below):
            for trained, lengths, rewards in self._open.pop(cohort).values():
                self._generated.add(lengths, rewards)
                if trained:
                    self._trained.add(lengths, rewards)

    def figures(self) -> dict[str, float]:
        """Return the relative difference between the means of trained and generated groups, by kind."""
        return {f"bias/{kind}": self._difference(kind) for kind in KINDS}

    def warnings(self) -> list[str]:
        """Return a message for each drift that has not been reported before."""
        messages = []
        for kind in KINDS:
            generated, trained = self._generated.values[kind], self._trained.values[kind]
            if kind in self._told or min(len(generated), len(trained)) < ENOUGH:
                continue
            if abs(self._difference(kind)) > MUCH and (p := ks_p_value(list(generated), list(trained))) < SURE:
                self._told.add(kind)
                messages.append(
                    f"the trained groups are not a fair sample of the generated ones: mean {kind} {fmean(trained):.4g} "
                    f"against {fmean(generated):.4g} ({len(trained)} of {len(generated)}, KS test p = {p:.1g}): "
                    "see the ledger for what was discarded (rollout.accept, oversample, over_age, failures)"
                )
        return messages

    def _difference(self, kind: str) -> float:
        generated, trained = self._generated.values[kind], self._trained.values[kind]
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
