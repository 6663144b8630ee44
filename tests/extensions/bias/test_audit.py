"""The audit tells what favours short answers, and is silent where nothing is thrown away."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RecordError
from asyncrl.extensions.bias.audit import Audit, ks_p_value
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, PublishTimeline
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.reporters import RolloutRun
from tests.fakes import addresses, tiny_config
from tests.rollout.service import Site, at

BOUND = 2
Played = tuple[list[int], list[float]]
"""Lengths and rewards of a group."""


class Audited:
    """An audit of a run whose groups may be two versions old, and its warnings."""

    def __init__(self, bound: int = BOUND) -> None:
        self.told: list[str] = []
        self.audit = Audit()
        config = tiny_config(**{"rollout.max_staleness": bound, "rollout.lead": None})
        self.audit.start(RolloutRun(config, addresses(), Path(), lambda text, trace=None: self.told.append(text)))

    def play(
        self, born: int, uid: str, lengths: list[int], rewards: Sequence[float | None], purpose="training"
    ) -> None:
        """A group ends."""
        episodes = [EpisodeTimeline(reward, tokens, []) for reward, tokens in zip(rewards, lengths, strict=True)]
        self.audit.record(GroupTimeline(uid, 0, "t", purpose, born, 0.0, 1.0, "committed", episodes))

    def publish(self, version: int) -> None:
        self.audit.record(PublishTimeline(version, 0.0, 0.0))


def lengths(draw: random.Random, count: int = 4) -> list[int]:
    return [int(draw.lognormvariate(4, 0.9)) + 1 for _ in range(count)]


def run(steps: int, keep: Callable[[Played, list[Played]], bool], groups: int = 10) -> Audited:
    """Groups with rewards of their own are born at each version; `keep` chooses those that are trained."""
    draw, site = random.Random(0), Audited()
    for step in range(steps):
        born = [(lengths(draw), [float(draw.random() < 0.3) for _ in range(4)]) for _ in range(groups)]
        for number, one in enumerate(born):
            site.play(step, f"g{step}-{number}", *one)
        uids = [f"g{step}-{number}" for number, one in enumerate(born) if keep(one, born)]
        site.audit.record(BatchTimeline(step, 0.0, 0.0, uids))
        site.publish(step + 1)
    return site


def test_where_everything_is_trained_there_is_no_bias_at_all() -> None:
    site = run(50, lambda one, born: True)
    assert set(site.audit.figures().values()) == {0.0}
    assert site.told == []


def test_dropping_the_slowest_is_told_once() -> None:
    site = run(60, lambda one, born: one[0] < max(two[0] for two in born) and max(one[0]) < 120)
    assert site.audit.figures()["bias/length"] < -0.2
    assert abs(site.audit.figures()["bias/reward"]) < 0.1
    (told,) = site.told
    assert "not a fair sample" in told
    assert "mean length" in told


def test_dropping_at_random_is_no_drift() -> None:
    draw = random.Random(1)
    assert run(80, lambda one, born: draw.random() < 0.7).told == []


def test_rejecting_the_hopeless_is_a_drift_of_difficulty() -> None:
    assert any("mean difficulty" in told for told in run(60, lambda one, born: len(set(one[1])) > 1).told)


def test_trainable_groups_say_nothing_and_are_kept() -> None:
    site, resumed = Audited(), Audited()
    for version in range(100):
        site.play(version, f"short{version}", [1], [0.0])
        site.play(version, f"long{version}", [1000], [None])
        site.play(version, f"e{version}", [5000], [1.0], purpose="evaluation")
        site.audit.record(BatchTimeline(version, 0.0, 0.0, [f"short{version}"]))
    site.publish(BOUND)
    assert set(site.audit.figures().values()) == {0.0}
    resumed.audit.restore(site.audit.state() or b"")
    for one in (site, resumed):
        one.publish(BOUND + 1)  # of version 0
        assert one.audit.figures()["bias/length"] == pytest.approx(1 / 500.5 - 1)
        assert one.told == []  # 1 of 2
    assert site.audit.state() == resumed.audit.state()
    with pytest.raises(RecordError, match="state of the bias audit is damaged"):
        resumed.audit.restore(b"\x93")


def test_drift_of_a_service_is_told_once() -> None:
    async def play(site: Site) -> None:
        for version in range(120):
            while (ticket := site.groups._buffer.admit()) is not None:
                if ticket.slot % 2:
                    await site.play(ticket)
                else:
                    await site.play(ticket, 40, reject="timeout")  # whatever takes long is lost
            await site.groups.batch(version)
            await site.groups.published(version + 1)
        audited = Audited(1)
        for record in site.records:
            audited.audit.record(record)
        (told,) = audited.told
        assert "mean length 2 against" in told

    at(play)


def test_ready_group_that_loses_its_place_was_not_trained() -> None:
    """over_age=drop moves seats to newer cohorts; one with too many has ready groups left when it is due."""

    async def play(site: Site) -> None:
        tickets: dict[int, Ticket] = {}
        for version, finished in enumerate([(2, 3), (8, 9), (4, 5, 6, 7)]):
            while (ticket := site.groups._buffer.admit()) is not None:
                tickets[ticket.slot] = ticket
            for slot in finished:
                await site.play(tickets.pop(slot))
            await site.groups.batch(version)
            for ticket, reason in await site.groups.unwanted() if version == 0 else []:
                await site.play(tickets.pop(ticket.slot), reject=reason)
            await site.groups.published(version + 1)
        audited = Audited(2)
        for record in site.records:
            audited.audit.record(record)
        audited.publish(4)
        assert site.groups.ledger().groups.rejected == {"over_age": 4}
        generated, trained = audited.audit._values("reward")
        assert (len(generated), len(trained)) == (2 * 8, 2 * 6)  # slots 6 and 7 were played, but not trained

    at(play, bound=2, over_age="drop", select=lambda ready, count: ready[-count:])


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.01, 1.0), (0.1, 0.0, 0.05), (1.0, 0.0, 1e-9)])
def test_probability_falls_with_the_difference(shift: float, low: float, high: float) -> None:
    draw = random.Random(3)
    one = [draw.gauss(0, 1) for _ in range(2000)]
    other = [draw.gauss(shift, 1) for _ in range(2000)]
    assert low <= ks_p_value(one, other) <= high


def test_probability_of_a_table() -> None:
    """Two samples of 20 that differ by 0.5: (sqrt(10) + 0.12 + 0.11 / sqrt(10)) * 0.5 = 1.658, whose Q is 0.00817."""
    one, other = [float(i) for i in range(20)], [float(i + 10) - 0.5 for i in range(20)]
    assert ks_p_value(one, other) == pytest.approx(0.00817, abs=2e-4)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.lists(st.floats(-5, 5), min_size=1, max_size=60))
@settings(max_examples=200)
def test_probability_is_one_and_symmetric(one: list[float], other: list[float]) -> None:
    assert 0.0 <= ks_p_value(one, other) == ks_p_value(other, one) <= 1.0
    assert ks_p_value(one, one) == 1.0
