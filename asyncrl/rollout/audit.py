"""Is what is trained a fair sample of what was generated? Answers that take long are lost first, in silence.

Lengths, rewards and difficulty (a group's mean reward) of the groups that were trained are compared with those of all
groups that were played, over cohorts that are closed: a running cohort would show its short answers first. Where
nothing is thrown away the two are the same groups; accept, oversample, over_age and failures make them differ. Of a
group that was stopped only the tokens that came are known: its length counts as shorter than it would have been.

The two-sample Kolmogorov-Smirnov test with its asymptotic p-value (Press et al., Numerical Recipes, section 14.3).
Pure: no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import fmean

WINDOW = 4096
"""Trajectories (or groups, of difficulty) that are compared, the latest."""
ENOUGH = 200
"""Fewer say nothing."""
SURE, MUCH = 0.001, 0.05
"""A drift is told when chance would make it with less than this probability, and the means differ by this share."""
KINDS = ("length", "reward", "difficulty")


@dataclass
class _Sample:
    """What is compared, by kind."""

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
    """What it compares."""

    cohorts: dict[int, dict[str, tuple[bool, list[int], list[float]]]]  # open ones, by number and group
    generated: dict[str, list[float]]
    trained: dict[str, list[float]]
    told: list[str]


class Audit:
    """The books of one run."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, tuple[bool, list[int], list[float]]]] = {}  # by cohort and group
        self._generated, self._trained = _Sample(), _Sample()
        self._told: set[str] = set()

    def state(self) -> AuditState:
        """To be written down at once: some of its parts are the audit's own."""
        return AuditState(self._open, self._generated.lists(), self._trained.lists(), sorted(self._told))

    def restore(self, state: AuditState) -> None:
        """As it was."""
        self._open, self._told = state.cohorts, set(state.told)
        for sample, values in ((self._generated, state.generated), (self._trained, state.trained)):
            for kind in KINDS:
                sample.values[kind].extend(values[kind])

    def note(self, cohort: int, uid: str, lengths: list[int], rewards: list[float], *, trained: bool) -> None:
        """A group has ended: tokens and, where they are known, rewards of its trajectories."""
        self._open.setdefault(cohort, {})[uid] = trained, lengths, rewards

    def drop(self, uid: str) -> None:
        """A group that was to be trained has lost its place in a batch."""
        for cohort in self._open.values():
            if uid in cohort:
                _, lengths, rewards = cohort[uid]
                cohort[uid] = False, lengths, rewards

    def close(self, below: int) -> None:
        """No group of an earlier cohort than this will be trained any more."""
        for cohort in sorted(number for number in self._open if number < below):
            for trained, lengths, rewards in self._open.pop(cohort).values():
                self._generated.add(lengths, rewards)
                if trained:
                    self._trained.add(lengths, rewards)

    def figures(self) -> dict[str, float]:
        """By how much the mean of what is trained differs from that of what was generated, in shares of the latter."""
        return {f"bias/{kind}": self._difference(kind) for kind in KINDS}

    def warnings(self) -> list[str]:
        """Drifts that were not told before."""
        found = []
        for kind in KINDS:
            generated, trained = self._generated.values[kind], self._trained.values[kind]
            if kind in self._told or min(len(generated), len(trained)) < ENOUGH:
                continue
            if abs(self._difference(kind)) > MUCH and (p := ks_p_value(list(generated), list(trained))) < SURE:
                self._told.add(kind)
                found.append(
                    f"what is trained is no fair sample of what was generated: mean {kind} {fmean(trained):.4g} "
                    f"against {fmean(generated):.4g} ({len(trained)} of {len(generated)}, KS test p = {p:.1g}): "
                    "the ledger says what was thrown away (rollout.accept, oversample, over_age, failures)"
                )
        return found

    def _difference(self, kind: str) -> float:
        generated, trained = self._generated.values[kind], self._trained.values[kind]
        if not generated or not trained or not fmean(generated):
            return 0.0
        return fmean(trained) / fmean(generated) - 1.0


def ks_p_value(one: list[float], other: list[float]) -> float:
    """Probability that two samples of one distribution differ as much."""
    one, other = sorted(one), sorted(other)
    distance = max(
        abs(bisect_right(one, value) / len(one) - bisect_right(other, value) / len(other)) for value in {*one, *other}
    )
    size = sqrt(len(one) * len(other) / (len(one) + len(other)))
    root = (size + 0.12 + 0.11 / size) * distance
    if root < 0.2:
        return 1.0  # the series does not converge there
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * root) ** 2) for k in range(1, 101))))
