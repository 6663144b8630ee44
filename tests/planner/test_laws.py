"""No simulated run is faster than its resources allow, and a good one comes close."""

from __future__ import annotations

import pytest

from asyncrl.planner.engine import EngineShape
from asyncrl.planner.lengths import Lengths
from asyncrl.planner.simulation import Setting, SimulatedWorkload, simulate
from asyncrl.planner.sizing import bottleneck_bound, engines_bound, trainer_bound


def test_the_published_calibration() -> None:
    """32 devices of 12 ms + 0.12 ms a request and 256 of them, 10,000 tokens/s each in training, 6 s a step: with 2,048
    answers of 7,284 tokens the bound is 114,000 tokens per second."""
    bound, engines = bottleneck_bound(32, EngineShape(0.012, 0.00012, 256), 10_000, 6.0, 2048 * 7284)
    assert bound == pytest.approx(114_000, rel=0.05)
    assert 18 <= engines <= 22


def test_slack_everywhere_reaches_the_bound_and_nothing_exceeds_it() -> None:
    shape, lengths = EngineShape(0.01, 0.0005, 16), Lengths(100, 0.5, 400, 4)
    mean = sum(one.tokens for number in range(400) for one in lengths.group(number)) / 1600
    bound, engines = bottleneck_bound(6, shape, 400.0, 0.2, 32 * mean)
    shares = []
    for split in range(1, 6):
        setting = Setting(split, 400.0 * (6 - split), 8, train_fixed=0.2, in_play=0, shape=shape)
        found = simulate(SimulatedWorkload(lengths.episodes(), 8), setting, 40)
        assert found.tokens_per_s < 1.03 * min(
            engines_bound(split, shape), trainer_bound(400.0 * (6 - split), 0.2, 32 * mean)
        )
        shares.append(found.tokens_per_s / bound)
    assert max(shares) > 0.93
    assert shares.index(max(shares)) + 1 == engines
