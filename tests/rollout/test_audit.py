"""The audit tells what favours short answers, and is silent where nothing is thrown away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.audit import Audit, ks_p_value


def lengths(draw: random.Random, count: int = 4) -> list[int]:
    return [int(draw.lognormvariate(4, 0.9)) + 1 for _ in range(count)]


def played(audit: Audit, cohorts: int, keep, *, groups: int = 10, seed: int = 0) -> None:
    """Cohorts of groups with rewards of their own; `keep` chooses those that are trained."""
    draw = random.Random(seed)
    for cohort in range(cohorts):
        drawn = [(lengths(draw), [float(draw.random() < 0.3) for _ in range(4)]) for _ in range(groups)]
        for number, one in enumerate(drawn):
            audit.note(cohort, f"g{cohort}-{number}", *one, trained=keep(one, drawn))
    audit.close(cohorts)


def test_where_everything_is_trained_there_is_no_bias_at_all() -> None:
    audit = Audit()
    played(audit, 50, lambda one, drawn: True)
    assert set(audit.figures().values()) == {0.0}
    assert audit.warnings() == []


def test_dropping_the_slowest_is_told_once_with_means_and_probability() -> None:
    audit = Audit()
    played(audit, 50, lambda one, drawn: one[0] < max(two[0] for two in drawn) and max(one[0]) < 120)
    assert audit.figures()["bias/length"] < -0.2
    assert abs(audit.figures()["bias/reward"]) < 0.1
    (told,) = audit.warnings()
    assert "not a fair sample" in told
    assert "mean length" in told
    assert audit.warnings() == []


def test_dropping_at_random_is_no_drift() -> None:
    draw = random.Random(1)
    audit = Audit()
    played(audit, 80, lambda one, drawn: draw.random() < 0.7)
    assert audit.warnings() == []


def test_rejecting_the_hopeless_is_a_drift_of_difficulty() -> None:
    audit = Audit()
    played(audit, 60, lambda one, drawn: len(set(one[1])) > 1)
    assert any("mean difficulty" in told for told in audit.warnings())


def test_open_cohorts_and_few_groups_say_nothing() -> None:
    audit = Audit()
    for cohort in range(100):
        audit.note(cohort, f"short{cohort}", [1], [0.0], trained=True)
        audit.note(cohort, f"long{cohort}", [1000], [], trained=False)
    assert set(audit.figures().values()) == {0.0}
    audit.close(20)
    assert audit.figures()["bias/length"] < -0.9
    assert audit.warnings() == []  # 20 of 40


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
