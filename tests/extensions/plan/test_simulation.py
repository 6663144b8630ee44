"""A run in simulated time obeys the laws that can be computed by hand, and the buffer's bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.extensions.plan import simulation
from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload, SimulationResult, simulate

SHAPE = EngineShape(0.01, 0.0001, 64)
LENGTHS = Lengths(mean=400, sigma=0.9, longest=3000, group_size=4)
WORKLOAD = SimulatedWorkload(LENGTHS.episodes(), batch_groups=8)


def outcome(steps: int = 12, *, workload: SimulatedWorkload = WORKLOAD, **changes: object) -> SimulationResult:
    values: dict = {"engines": 2, "train_rate": 1e9, "max_staleness": 2, "in_play": 0, "shape": SHAPE} | changes
    return simulate(workload, Setting(**values), steps)


def test_a_slow_trainer_is_the_only_limit() -> None:
    """X = tokens / (tokens / rate + fixed + pause)."""
    found = outcome(train_rate=500.0, train_fixed=2.0, pause=1.0, max_staleness=4)
    assert found.trainer_busy == pytest.approx(1 - 1.0 / found.step, rel=1e-6)
    assert found.tokens_per_s * found.step == pytest.approx((found.step - 3.0) * 500.0)


def test_publishing_beside_training_skips_the_pause() -> None:
    """X = tokens / (tokens / rate + fixed)."""
    found = outcome(train_rate=500.0, train_fixed=2.0, pause=1.0, max_staleness=4, overlap=True)
    assert found.trainer_busy == pytest.approx(1)
    assert found.tokens_per_s * found.step == pytest.approx((found.step - 2.0) * 500.0, rel=0.01)
    assert found.staleness_max <= 4


def test_synchronous_step_is_longest_answer_then_trainer() -> None:
    """Equal answers, one engine: their time in a batch of all of them, then the trainer's."""
    equal = SimulatedWorkload(lambda _: [SimulatedEpisode([100.0])] * 4, batch_groups=8)
    found = outcome(workload=equal, engines=1, max_staleness=0, train_rate=1600.0, train_fixed=1.0, pause=0.5)
    assert found.step == pytest.approx(100 * (0.01 + 0.0001 * 32) + 3200 / 1600 + 1.0 + 0.5)
    assert found.staleness_max == 0


@pytest.mark.parametrize(("parts", "step"), [(1, 200 * 0.0101 + 3.5), (2, max(100 * 0.0101 + 1.0, 200 * 0.0101) + 2.5)])
def test_first_part_trains_while_the_last_is_answered(parts: int, step: float) -> None:
    """Two engines with an answer of 100 and one of 200 tokens, which take one and two seconds to train."""
    two = SimulatedWorkload(lambda number: [SimulatedEpisode([100.0 + 100.0 * (number % 2)])], batch_groups=2)
    found = outcome(workload=two, max_staleness=0, train_rate=100.0, train_fixed=0.5, parts=parts)
    assert found.step == pytest.approx(step)


def test_tools_take_their_time_and_no_engine() -> None:
    slow = SimulatedWorkload(lambda _: [SimulatedEpisode([10.0, 10.0], [5.0])] * 2, batch_groups=1)
    assert outcome(workload=slow, max_staleness=0).step == pytest.approx(20 * (0.01 + 0.0001 * 2) + 5.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.data())
def test_no_token_is_older_than_the_bound(bound: int, data: st.DataObject) -> None:
    lead = data.draw(st.integers(0, bound))
    limit, parts = data.draw(st.sampled_from([None, 0, 1, 20])), data.draw(st.integers(1, 8))
    publish = {"overlap": data.draw(st.booleans()), "pause": data.draw(st.sampled_from([0.0, 0.3, 30.0]))}
    found = outcome(6, max_staleness=bound, lead=lead, in_play=limit, parts=parts, **publish)
    assert found.staleness_max <= bound


@pytest.mark.parametrize("lead", [1, 2])
def test_slack_never_costs_throughput_nor_breaks_the_bound(lead: int) -> None:
    """I6, on a heavy tail."""
    heavy = SimulatedWorkload(Lengths(mean=400, sigma=1.3, longest=8000, group_size=4).episodes(), batch_groups=8)
    found = [outcome(60, workload=heavy, lead=lead, max_staleness=lead + slack) for slack in range(4)]
    for less, more in itertools.pairwise(found):
        assert more.tokens_per_s > 0.97 * less.tokens_per_s
    for slack, one in enumerate(found):
        assert one.staleness_max <= lead + slack
    assert found[-1].tokens_per_s > 1.1 * found[0].tokens_per_s


def test_no_batch_waits_for_a_late_replacement() -> None:
    half = SimulatedWorkload(LENGTHS.episodes(), batch_groups=8, accepted=lambda number: number % 2 == 0)
    found = outcome(40, workload=half, max_staleness=3)
    assert (
        found.tokens_per_s > 0.6 * outcome(40, max_staleness=3).tokens_per_s
    )  # 0.4 if it took the rejected one's place
    assert found.staleness_max <= 3


def test_siblings_that_are_spread_make_engines_equally_busy() -> None:
    """One group, four engines: together, its siblings share one engine; spread, each has its own."""
    equal = SimulatedWorkload(lambda _: [SimulatedEpisode([100.0])] * 4, batch_groups=1)
    together, spread = (outcome(workload=equal, engines=4, max_staleness=0, spread=one) for one in (False, True))
    assert together.step == pytest.approx(100 * (0.01 + 0.0001 * 4), rel=1e-3)
    assert spread.step == pytest.approx(100 * (0.01 + 0.0001), rel=1e-3)


def test_waiting_for_requests_costs_what_asynchrony_gave() -> None:
    free, drained = outcome(max_staleness=4, train_rate=2e4), outcome(max_staleness=4, train_rate=2e4, drain=True)
    assert free.tokens_per_s > 1.5 * drained.tokens_per_s


def test_lengths_follow_the_distribution_reproducibly() -> None:
    drawn = [episode for number in range(400) for episode in LENGTHS.group(number)]
    assert sum(one.tokens for one in drawn) / len(drawn) == pytest.approx(400, rel=0.1)
    assert LENGTHS.group(7) == LENGTHS.group(7) != LENGTHS.group(8)
    turns = [Lengths(400, 0.9, 3000, 4, turns=8, tool_seconds=2.0).group(number) for number in range(200)]
    assert sum(len(one.turns) for group in turns for one in group) / 800 == pytest.approx(8, rel=0.1)
    seconds = [value for group in turns for one in group for value in one.seconds]
    assert sum(seconds) / len(seconds) == pytest.approx(2.0, rel=0.2)


def test_a_group_goes_to_the_engine_with_the_fewest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """And to the first of equals: the heap finds what a scan of all engines finds, also after it was cleared."""
    chosen: set[int] = set()
    found = simulation.SimulatedRun._fewest_requests

    def checked(run: simulation.SimulatedRun) -> SimulatedEngine:
        place = min(range(len(run._open)), key=run._open.__getitem__)
        chosen.add(place)
        engine = found(run)
        assert engine is run._engines[place]
        assert len(run._least) <= 8 * len(run._open)
        return engine

    monkeypatch.setattr(simulation.SimulatedRun, "_fewest_requests", checked)
    turns = Lengths(400, 0.9, 3000, 4, turns=3, tool_seconds=2.0)
    outcome(8, engines=5, workload=SimulatedWorkload(turns.episodes(), batch_groups=16))
    assert chosen == set(range(5))
