"""What the controller of elastic runs takes from the latest steps: waits, batches made, and how lengths grow."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from asyncrl.extensions.plan.elastic_window import FEWEST, WINDOW, StepObservation, StepWindow
from asyncrl.extensions.plan.laws import LengthSample


def seen(step: int, tokens: float = 100.0, made: float = 1.0, waited: float = 0.0) -> StepObservation:
    return StepObservation(step, step * 10.0, 10.0, waited, 0.0, 800.0, 1, [[(tokens, 0.0)] * 2] * 4, made=made)


def window(steps: list[StepObservation]) -> StepWindow:
    found = StepWindow()
    for one in steps:
        found.add(one)
        found.add_lengths(one)
    return found


def test_lagging_engines_are_seen_before_the_trainer_waits() -> None:
    behind = window([seen(step, made=0.5) for step in range(10)])
    assert (behind.waits, behind.made) == (0.0, pytest.approx(0.6))  # five batches, and one by chance
    assert behind.lacks == pytest.approx(0.4)
    late = window([*(seen(step) for step in range(9)), seen(9, made=0.0)])
    assert (late.made, late.lacks) == (1.0, 0.0)
    waiting = window([seen(step, made=2.0, waited=2.0) for step in range(10)])
    assert waiting.lacks == pytest.approx(waiting.waits) == pytest.approx(0.2)  # more than what is trained helps nobody


def test_growth_is_that_of_the_logarithm_and_outlives_a_change() -> None:
    found = window([seen(step, 100 * math.exp(0.02 * step)) for step in range(WINDOW)])
    found.clear()
    assert len(found) == 0
    assert found.growth == pytest.approx(0.02)
    sample = LengthSample(np.array([[100.0, 500.0]]), np.array([[1.0, 2.0]]))
    grown = found.grown(sample, 10)
    assert grown.tokens.tolist() == [[pytest.approx(100 * math.exp(0.2)), 500.0]]  # 500 may be the longest allowed
    assert grown.seconds is sample.seconds


def test_lengths_that_shrink_or_are_hardly_known_do_not_grow() -> None:
    for steps in (
        [seen(step, 100 * math.exp(-0.02 * step)) for step in range(WINDOW)],
        [seen(step) for step in (1, 2)],
    ):
        found = window(steps)
        assert found.growth == 0.0
        sample = LengthSample(np.array([[100.0]]), np.array([[0.0]]))
        assert found.grown(sample, 10) is sample
    few = window([seen(step, 100 * math.exp(0.02 * step)) for step in range(FEWEST)])
    assert few.growth > 0
    assert not few.trend_known


def test_trendless_noise_counts_as_growth_a_sixth_of_times() -> None:
    """Growth is the slope less its standard error: of chance slopes, a sixth exceed that."""
    draw = random.Random(0)
    grows = [
        window([seen(step, 100 * math.exp(draw.gauss(0, 0.2))) for step in range(WINDOW)]).growth > 0
        for _ in range(300)
    ]
    assert 0.10 < sum(grows) / len(grows) < 0.25
