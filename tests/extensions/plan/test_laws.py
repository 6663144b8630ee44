"""No simulated run is faster than its resources allow, and the laws say how fast it is."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import LengthSample, bottleneck_bound, engines_bound, predict, trainer_bound
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload, simulate
from scripts.bench_planner import grid, law_errors


def test_the_published_calibration() -> None:
    """32 devices of 12 ms + 0.12 ms a request and 256 of them, 10,000 tokens/s each in training, 6 s a step: with 2,048
    answers of 7,284 tokens the bound is 114,000 tokens per second."""
    bound, engines = bottleneck_bound(32, EngineShape(0.012, 0.00012, 256), 10_000, 6.0, 2048 * 7284)
    assert bound == pytest.approx(114_000, rel=0.05)
    assert 18 <= engines <= 22


def test_slack_everywhere_reaches_the_bound_and_no_more() -> None:
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


def test_laws_agree_with_the_simulation() -> None:
    """The full grid is that of scripts/bench_planner.py."""
    settings = [setting for _, setting in grid(16)]
    assert {one.pause for one in settings} == {0, 1}
    assert {one.train_fixed for one in settings} == {0, 1, 5}
    assert not any(one.spread for one in settings)
    errors = law_errors(16, 60)
    assert statistics.median(errors) <= 0.05
    assert errors[int(0.9 * len(errors))] <= 0.15


@pytest.mark.parametrize("sigma", [0.6, 0.9])
@pytest.mark.parametrize("prompt", [1000, 4000])
@pytest.mark.parametrize("prefill", [8000, 20_000])
def test_prompts_as_long_as_answers_or_longer_are_in_the_laws(sigma: float, prompt: int, prefill: int) -> None:
    """The cache limits the batch, so that siblings cannot share the prefill of their prompt."""
    shape = EngineShape(0.012, 0.0002, 64, kv_tokens=60_000, prefill_rate=prefill)
    lengths, setting = Lengths(1000, sigma, 8000, 8), Setting(3, 1e9, 4, in_play=0, pause=1.0, shape=shape)
    workload, sample = SimulatedWorkload(lengths.episodes(), 16, prompt), LengthSample.of(lengths.group)
    found = simulate(workload, setting, 30, 8).tokens_per_s
    assert predict(sample, workload, setting).tokens_per_s == pytest.approx(found, rel=0.1)
    without = predict(sample, replace(workload, prompt=0.0), setting).tokens_per_s
    assert without > 1.1 * found


def test_law_that_allows_both_sides_has_no_limit() -> None:
    """A limit that equals theirs would say that there is no headroom."""
    shape, lengths = EngineShape(0.01, 0.0005, 16), Lengths(100, 0.5, 400, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 8), LengthSample.of(lengths.group)
    law = predict(sample, workload, Setting(4, 200.0, 8, 4, in_play=0, shape=shape))
    assert law.binds == "trainer"
    assert math.isinf(law.limits["concurrency"])
    assert math.isinf(law.limits["order"])
    assert law.limits["engines"] > law.limits["trainer"] == law.samples_per_s


def test_binding_law_is_named_and_staleness_is_lead_less_wait() -> None:
    shape, lengths = EngineShape(0.01, 0.0005, 16), Lengths(100, 0.5, 400, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 8), LengthSample.of(lengths.group)

    def found(bound: int, lead: int, rate: float) -> tuple[str, float, float]:
        setting = Setting(1, rate, bound, lead, in_play=0, shape=shape)
        law = predict(sample, workload, setting)
        return law.binds, law.staleness, simulate(workload, setting, 60, 20).staleness_mean

    assert found(4, 4, 200.0)[:2] == ("trainer", 4.0)
    assert found(2, 2, 1e9)[0] == "engines"
    assert found(0, 0, 1e9)[0] == "order"
    _, said, simulated = found(8, 8, 1e9)
    assert said == pytest.approx(simulated, abs=0.5)
    assert simulated < 7


@pytest.mark.parametrize("in_play", [32, 64, 128])
def test_concurrency_limit_lowers_both_as_simulated(in_play: int) -> None:
    lengths = Lengths(400, 0.9, 3000, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 16), LengthSample.of(lengths.group)
    setting = Setting(2, 1e9, 8, 4, in_play=in_play, shape=EngineShape(0.01, 0.0005, 32))
    law, simulated = predict(sample, workload, setting), simulate(workload, setting, 60, 20)
    assert law.tokens_per_s == pytest.approx(simulated.tokens_per_s, rel=0.1)
    assert law.staleness == pytest.approx(simulated.staleness_mean, abs=1.0)


@pytest.mark.parametrize(("bound", "lead"), [(1, 1), (2, 2), (4, 2), (8, 8)])
@pytest.mark.parametrize("rate", [600.0, 3000.0])
@pytest.mark.parametrize("pause", [1.0, 10.0])
def test_what_publishing_beside_training_gives_is_as_simulated(
    pause: float, rate: float, bound: int, lead: int
) -> None:
    lengths = Lengths(400, 0.9, 3000, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 16), LengthSample.of(lengths.group)
    shape = EngineShape(0.01, 0.0005, 32)
    setting = Setting(2, rate, bound, lead, train_fixed=1.0, pause=pause, overlap=True, in_play=0, shape=shape)
    law, simulated = predict(sample, workload, setting), simulate(workload, setting, 60, 20)
    assert law.tokens_per_s == pytest.approx(simulated.tokens_per_s, rel=0.15)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_what_training_in_parts_gives_is_as_simulated(bound: int) -> None:
    lengths = Lengths(400, 0.9, 3000, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 16), LengthSample.of(lengths.group)
    rates = []
    for parts in (1, 8):
        setting = Setting(
            2, 4000.0, bound, train_fixed=0.5, parts=parts, in_play=0, shape=EngineShape(0.01, 0.0005, 32)
        )
        law = predict(sample, workload, setting)
        rates.append((law.tokens_per_s, simulate(workload, setting, 60, 10).tokens_per_s))
    assert rates[1] == pytest.approx(rates[1][::-1], rel=0.1)
    assert rates[1][1] > 1.03 * rates[0][1]


def test_lead_limits_what_is_in_flight_as_simulated() -> None:
    lengths = Lengths(400, 0.6, 3000, 4)
    workload, sample = SimulatedWorkload(lengths.episodes(), 16), LengthSample.of(lengths.group)
    setting = Setting(4, 1e9, 8, 1, in_play=0, shape=EngineShape(0.01, 0.0005, 64))
    law = predict(sample, workload, setting)
    assert law.binds == "concurrency"
    assert law.tokens_per_s == pytest.approx(simulate(workload, setting, 60, 20).tokens_per_s, rel=0.1)
