"""Simulated answers that move, and ordered starts, obey the laws that can be computed by hand, and the bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.migration import PERIOD
from asyncrl.planner.engine import EngineShape
from asyncrl.planner.lengths import Lengths
from asyncrl.planner.long_tail import LongTail, simulate_long_tail
from asyncrl.planner.simulation import Setting, SimulatedEpisode, SimulatedWorkload, SimulationResult, simulate

SHAPE = EngineShape(0.01, 0.01, 64)
LENGTHS = Lengths(mean=200, sigma=0.9, longest=1500, group_size=4)


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {"engines": 2, "train_rate": 1e9, "max_staleness": 0, "in_play": 0, "shape": SHAPE}
    return Setting(**values | changes)


def outcome(workload: SimulatedWorkload, options: LongTail, steps: int = 6, **changes: Any) -> SimulationResult:
    return simulate_long_tail(workload, setting(**changes), options, steps)


def test_half_of_the_siblings_on_one_engine_move_to_the_idle_one() -> None:
    """Four siblings, of which two move at the first two looks after 100 tokens: 0.05 s a token before, 0.03 s after."""
    four = SimulatedWorkload(lambda _: [SimulatedEpisode([400.0])] * 4, batch_groups=1)
    stay, move = (outcome(four, LongTail(after)).step for after in (None, 100))
    assert stay == pytest.approx(400 * 0.05)
    assert move == pytest.approx(100 * 0.05 + 300 * 0.03, abs=2.5 * PERIOD)


def test_a_prefill_that_costs_more_than_it_gains_makes_moving_slower() -> None:
    four = SimulatedWorkload(lambda _: [SimulatedEpisode([400.0])] * 4, batch_groups=1, prompt=200.0)
    shape = EngineShape(0.01, 0.01, 64, prefill_rate=20.0)
    stay, move = (outcome(four, LongTail(after), shape=shape).step for after in (None, 100))
    assert move > stay


@settings(deadline=None, max_examples=10)
@given(
    bound=st.integers(0, 3),
    after=st.sampled_from([None, 20, 100]),
    order=st.sampled_from(["in_order", "shortest_first", "longest_first"]),
    limit=st.sampled_from([0, 16]),
    spread=st.booleans(),
)
def test_no_option_breaks_the_bound_or_loses_a_token(
    bound: int, after: int | None, order: Any, limit: int, spread: bool
) -> None:
    again = LENGTHS.episodes()
    workload = SimulatedWorkload(lambda number: again(number % 24), batch_groups=4)
    changes = {"max_staleness": bound, "in_play": limit, "spread": spread, "train_rate": 2e3}
    found = outcome(workload, LongTail(after, start_order=order), 12, **changes)
    same = simulate(workload, setting(**changes), 12)
    assert found.staleness_max <= bound
    assert found.tokens_per_s * found.step == pytest.approx(same.tokens_per_s * same.step)


@pytest.mark.parametrize(("order", "tokens"), [("shortest_first", 400), ("longest_first", 300)])
def test_two_groups_at_a_time_end_sooner_if_the_longest_begins_first(order: Any, tokens: int) -> None:
    """Answers of 100, 100 and 300 tokens, of which two may run, each on an engine of its own."""
    lengths = (100.0, 300.0, 100.0)
    three = SimulatedWorkload(lambda number: [SimulatedEpisode([lengths[number % 3]])], batch_groups=3)
    found = outcome(three, LongTail(start_order=order), in_play=2)
    assert found.step == pytest.approx(tokens * 0.02)
