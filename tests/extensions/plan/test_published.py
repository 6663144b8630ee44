"""Laws and simulation agree with a published simulation of 32 devices: how many times as fast as the colocated
synchronous run each strict bound and lead is, on four workloads.

Its setup: engines of 12 ms + 0.12 ms a request and at most 256, a trainer of 10,000 tokens/s per device and 6 s a step,
3 s a publish, 15 s for changing from generation to training and back; batches of 128 groups of 16. Its parameters of
the workloads were found by drawing from its own generator: they give its means of an episode and of the longest of a
group, over 400 groups, to all digits. results/plans.md says where and why the two differ most.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import LengthSample, bottleneck_bound, predict
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload, simulate

SHAPE = EngineShape(0.012, 0.00012, 256)
TURNS = Setting(32, 320_000.0, 0, 0, train_fixed=6.0, pause=15.0, in_play=0, spread=True, shape=SHAPE)
TOOLS = {"turns": 8.0, "tool_seconds": 10.0, "tool_sigma": 1.5, "tool_longest": 600.0}
LENGTHS = {
    "reasoning": Lengths(8000, 0.9, 27_000, 16),
    "short tail": Lengths(8000, 0.3, 27_000, 16),
    "heavy tail": Lengths(6000, 1.3, 48_000, 16),
    "agent": Lengths(6000, 0.8, 27_000, 16, **TOOLS),
}
SECONDS = {"reasoning": 461, "short tail": 371, "heavy tail": 686, "agent": 1077}
"""A synchronous step."""
ROWS = {  # engines, bound, lead, throughput over the synchronous run's
    "reasoning": [
        *((20, 1, 1, 1.46), (24, 2, 2, 1.89), (20, 2, 1, 1.49), (22, 4, 4, 2.75), (20, 4, 2, 2.21), (20, 8, 8, 3.44)),
        (20, 8, 4, 3.02),
    ],
    "short tail": [
        *((20, 1, 1, 1.28), (22, 2, 2, 1.73), (20, 2, 1, 1.40), (20, 4, 4, 2.28), (22, 4, 2, 2.02), (20, 8, 8, 2.57)),
        (20, 8, 4, 2.59),
    ],
    "heavy tail": [
        *((20, 1, 1, 1.69), (22, 2, 2, 2.29), (22, 2, 1, 2.26), (24, 4, 4, 3.44), (26, 4, 2, 3.17), (22, 8, 8, 5.05)),
        (20, 8, 4, 4.60),
    ],
    "agent": [
        *((20, 1, 1, 1.83), (20, 2, 2, 2.81), (20, 2, 1, 2.54), (20, 4, 4, 4.39), (20, 4, 2, 4.04), (20, 8, 8, 6.90)),
        (20, 8, 4, 7.14),
    ],
}
"""Rows that vary between draws are those of the same program with 12 or 24 steps and several seeds."""
PRINTED = {
    "heavy tail": {(4, 2): 3.38, (8, 4): 4.96},
    "agent": {(1, 1): 1.69, (2, 2): 2.45, (8, 8): 6.46},
}
"""What was published instead."""
MISSED = {"short tail": {(2, 1): 0.11}, "agent": {(1, 1): 0.11, (2, 2): 0.13, (8, 8): 0.13}}
"""Rows as published of which the laws are more than a tenth off, and how far."""
BOUNDS = {"reasoning": 3.48, "short tail": 2.61, "heavy tail": 7.06, "agent": 10.32}
"""What no asynchronous run exceeds."""
DRAINED = {"reasoning": (28, 1.15), "short tail": (26, 1.15), "heavy tail": (28, 1.11)}
"""Engines and ratio with bound 4, if each publish waits until no request is in flight."""
BY_SIMULATION = {("short tail", 2, 1)}
"""The concurrency law is 11 % off here."""


def apart(sample: LengthSample, engines: int, bound: int, lead: int) -> Setting:
    """Their limit of concurrency is that of the engines' batches; it counts episodes that are not finished, and ours
    those of unfinished groups."""
    return replace(
        TURNS,
        engines=engines,
        train_rate=10_000.0 * (32 - engines),
        max_staleness=bound,
        lead=lead,
        pause=3.0,
        in_play=round(256 * engines / sample.kappa),
    )


@pytest.mark.parametrize("name", LENGTHS)
def test_laws_give_the_published_ratios(name: str) -> None:
    lengths = LENGTHS[name]
    workload, sample = SimulatedWorkload(lengths.episodes(), 128), LengthSample.of(lengths.group, 1024)
    synchronous = predict(sample, workload, TURNS).tokens_per_s
    assert 2048 * sample.mean / synchronous == pytest.approx(SECONDS[name], rel=0.1)
    most, _ = bottleneck_bound(32, SHAPE, 10_000.0, 6.0, 2048 * sample.mean)
    assert most / synchronous == pytest.approx(BOUNDS[name], rel=0.1)
    missed = {}
    for engines, bound, lead, ratio in ROWS[name]:
        setting = apart(sample, engines, bound, lead)
        found = predict(sample, workload, setting).tokens_per_s / synchronous
        off = found / PRINTED.get(name, {}).get((bound, lead), ratio) - 1
        if abs(off) > 0.1:
            missed[bound, lead] = round(off, 2)
        if (name, bound, lead) in BY_SIMULATION:
            found = simulate(workload, setting, 12, 4).tokens_per_s / simulate(workload, TURNS, 6, 0).tokens_per_s
        assert found == pytest.approx(ratio, rel=0.1), (bound, lead)
    assert missed == MISSED.get(name, {})


@pytest.mark.campaign
@pytest.mark.parametrize("name", LENGTHS)
def test_simulation_gives_the_published_ratios(name: str) -> None:
    """Two minutes. Like theirs, from the third step, when batches of the first cohorts are still early. With slack the
    steps up to the bound are left out, because our first cohorts are due earlier than their first groups."""
    sample, found = LengthSample.of(LENGTHS[name].group, 1024), []
    seeds, steps = ((0,), 12) if name == "agent" else ((0, 1), 24)
    for seed in seeds:
        workload = SimulatedWorkload(replace(LENGTHS[name], seed=seed).episodes(), 128)
        synchronous = simulate(workload, TURNS, 8, 0).tokens_per_s
        rates = []
        for engines, bound, lead, _ in ROWS[name]:
            warm = 2 if lead == bound else 2 + bound
            rates.append(simulate(workload, apart(sample, engines, bound, lead), steps, warm).tokens_per_s)
        found.append([rate / synchronous for rate in rates])
    for *setting, ratio in ROWS[name]:
        simulated = statistics.fmean(ratios.pop(0) for ratios in found)
        print(f"{name}, {setting}: published {ratio}, simulated {simulated:.2f} ({simulated / ratio - 1:+.0%})")
        assert simulated == pytest.approx(ratio, rel=0.1), setting


@pytest.mark.campaign
@pytest.mark.parametrize("name", DRAINED)
def test_waiting_publishes_make_asynchrony_useless(name: str) -> None:
    sample, (engines, ratio) = LengthSample.of(LENGTHS[name].group, 1024), DRAINED[name]
    workload = SimulatedWorkload(LENGTHS[name].episodes(), 128)
    setting = replace(apart(sample, engines, 4, 4), drain=True)
    found = simulate(workload, setting, 12, 4).tokens_per_s / simulate(workload, TURNS, 8, 0).tokens_per_s
    assert found == pytest.approx(ratio, rel=0.1)
