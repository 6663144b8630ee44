"""The cohort rule against a clock: how long one group can keep the trainer waiting, and that nothing is overtaken for
good, so that what is trained is as long as what was asked for."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.buffer import CohortBuffer, Ticket
from tests.examples import examples
from tests.fakes import group


@dataclass
class Clocked:
    """Plays a buffer's tickets, each for as long as `lasts` says, beside a trainer that needs `train` for a step."""

    buffer: CohortBuffer
    lasts: Callable[[Ticket], float]
    train: float
    timeout: float = inf
    places: int = 10**6
    now: float = 0.0
    taken_at: list[float] = field(default_factory=list)
    played: dict[int, list[int]] = field(default_factory=dict)
    """By cohort: lengths of the groups that were played."""
    trained: dict[int, int] = field(default_factory=dict)
    """By slot: lengths of the groups that were trained."""

    def play(self, steps: int) -> Clocked:
        """Raises AssertionError when the trainer waits for ever."""
        running: list[tuple[float, int, Ticket]] = []
        trains_until: float | None = None
        while len(self.taken_at) < steps:
            while len(running) < self.places and (ticket := self.buffer.admit()):
                ends = self.now + min(self.lasts(ticket), self.timeout)
                heapq.heappush(running, (ends, ticket.slot, ticket))
            if trains_until is None and (groups := self.buffer.take()):
                self.taken_at.append(self.now)
                self.trained |= {one.slot: one.trajectories[0].num_tokens for one in groups}
                trains_until = self.now + self.train
            next_end = running[0][0] if running else inf
            assert min(next_end, trains_until or inf) < inf, f"the trainer stands: {self.buffer.waiting_for()}"
            self.now = min(next_end, trains_until or inf)
            if self.now == trains_until:
                self.buffer.publish(self.buffer.version + 1)
                trains_until = None
            else:
                self._end(heapq.heappop(running)[2])
            for unwanted, reason in self.buffer.unwanted():
                running = [entry for entry in running if entry[2] != unwanted]
                heapq.heapify(running)
                self.buffer.reject(unwanted, reason)
                self.played.setdefault(unwanted.cohort, []).append(int(self.lasts(unwanted)))
        return self

    def _end(self, ticket: Ticket) -> None:
        length = self.lasts(ticket)
        if length > self.timeout:
            self.buffer.reject(ticket, "timeout")
            return
        self.played.setdefault(ticket.cohort, []).append(int(length))
        self.buffer.commit(ticket, group(ticket.slot, rewards=(0.0,), tokens=int(length)))


def heavy(seed: int) -> Callable[[Ticket], float]:
    """Log-normal lengths, a function of the slot; a group takes as long as it is long."""

    def lasts(ticket: Ticket) -> float:
        return float(1 + int(random.Random(f"{seed}-{ticket.slot}").lognormvariate(0, 1.5) * 20))

    return lasts


shapes = st.fixed_dictionaries(
    {
        "batch_groups": st.integers(1, 5),
        "lead": st.integers(0, 4),
        "slack": st.integers(0, 4),
        "places": st.sampled_from([2, 5, 10**6]),
        "train": st.sampled_from([1.0, 20.0, 200.0]),
    }
)


def clocked(shape: dict[str, Any], lasts: Callable[[Ticket], float], *, timeout: float = inf, **more: Any) -> Clocked:
    lead, slack = shape["lead"], shape["slack"]
    buffer = CohortBuffer(shape["batch_groups"], lead + slack, lead, clock=lambda: run.now, **more)
    run = Clocked(buffer, lasts, shape["train"], timeout, shape["places"])
    return run


@given(shapes, st.integers(1, 100), st.integers(0, 30), st.floats(1.0, 5.0))
@settings(max_examples=examples(100))
def test_endless_group_costs_no_step_more_than_its_timeout(shape, usual: int, slot: int, patience: float) -> None:
    """I9: no batch comes later, by more than the timeout, than it would if that group were like the others, which all
    take as long: their lengths must not depend on the slots, which shift by the one of the replacement."""

    def lasts(ticket: Ticket) -> float:
        return inf if ticket.slot == slot else usual

    timeout = patience * usual
    steps, size = 12, shape["batch_groups"]
    without, found = (
        clocked(shape, one, timeout=timeout).play(steps).taken_at for one in (lambda ticket: usual, lasts)
    )
    assert max(late - early for late, early in zip(found, without, strict=True)) <= timeout + 1e-6
    if slot < (steps - shape["slack"]) * size:
        with pytest.raises(AssertionError, match=r"the trainer stands: step .* 1 running, the oldest for"):
            clocked(shape, lasts).play(steps)


@given(shapes, st.integers(0, 2**32), st.booleans())
@settings(max_examples=examples(100))
def test_over_closed_cohorts_what_is_trained_is_what_was_played(shape, seed: int, picky: bool) -> None:
    """I10: the same lengths, not only the same distribution, however much longer some groups take."""
    draw = random.Random(seed)
    select = {"select": lambda ready, count: draw.sample(ready, count)} if picky else {}
    run = clocked(shape, heavy(seed), **select).play(12)
    for cohort in range(12 - shape["slack"]):
        slots = range(cohort * shape["batch_groups"], (cohort + 1) * shape["batch_groups"])
        assert sorted(run.trained[slot] for slot in slots) == sorted(run.played[cohort])


LONG = {"batch_groups": 16, "lead": 2, "slack": 2, "places": 10**6, "train": 20.0}


def distance(one: list[int], other: list[int]) -> float:
    """Kolmogorov's and Smirnov's distance of two samples, which scales so that chance exceeds 1.95 once in 1,000
    times."""
    one, other = sorted(one), sorted(other)
    gaps = [bisect_right(one, value) / len(one) - bisect_right(other, value) / len(other) for value in {*one, *other}]
    return sqrt(len(one) * len(other) / (len(one) + len(other))) * max(map(abs, gaps))


@pytest.mark.parametrize(
    ("waste", "fair"), [({}, True), ({"over_age": "drop"}, False), ({"oversample": 4}, False)], ids=str
)
def test_lengths_of_closed_cohorts_are_drawn_alike(waste, fair) -> None:
    """I10, by the Kolmogorov-Smirnov test: it must see the bias of dropping, or its silence would say nothing."""
    run = clocked(LONG, heavy(7), **waste).play(120)
    played = [length for cohort in range(110) for length in run.played[cohort]]
    trained = [length for slot, length in run.trained.items() if slot // LONG["batch_groups"] < 110]
    apart, shorter = distance(trained, played), sum(trained) / len(trained) < 0.8 * sum(played) / len(played)
    assert (apart == 0.0) if fair else (apart > 1.95 and shorter)
