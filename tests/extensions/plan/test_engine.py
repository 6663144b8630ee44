"""The simulated engine shares its processor, its batch and its cache as the model says, whatever arrives when."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine, SimulatedRequest

SHAPE = EngineShape(per_token=0.01, per_request=0.002, max_running=4)


def run(engine: SimulatedEngine, arrivals: list[tuple[float, SimulatedRequest]]) -> dict[SimulatedRequest, float]:
    """Return the end of each job."""
    arrivals, ended = sorted(arrivals, key=lambda entry: entry[0]), dict[SimulatedRequest, float]()
    for _ in range(100_000):
        time = min(engine.next_time(), arrivals[0][0] if arrivals else math.inf)
        if time == math.inf:
            return ended
        for job in engine.advance(time):
            if job.finished:
                ended[job] = time
        while arrivals and arrivals[0][0] <= time:
            engine.submit(arrivals.pop(0)[1], time)
    raise AssertionError("never idle")


@dataclass
class _Sharing:
    left: float
    arrival: float
    number: int


def by_hand(lengths: list[int], times: list[float], shape: EngineShape) -> list[float]:
    """The same, one event after the other, with every request's rest written down."""
    todo = [
        _Sharing(float(tokens), time, number) for number, (tokens, time) in enumerate(zip(lengths, times, strict=True))
    ]
    todo.sort(key=lambda one: one.arrival)
    now, queue, batch, ended = 0.0, list[_Sharing](), list[_Sharing](), [0.0] * len(lengths)
    while todo or queue or batch:
        while queue and len(batch) < shape.max_running:
            batch.append(queue.pop(0))
        step = shape.per_token + shape.per_request * len(batch)
        finish = now + min((one.left for one in batch), default=math.inf) * step
        upto = min(finish, todo[0].arrival if todo else math.inf)
        for one in batch:
            one.left -= (upto - now) / step
        now = upto
        for one in [one for one in batch if one.left < 1e-9]:
            ended[one.number] = now
            batch.remove(one)
        while todo and todo[0].arrival <= now:
            queue.append(todo.pop(0))
    return ended


JOBS = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 3)), min_size=1, max_size=12)


@given(JOBS)
def test_requests_end_when_an_exact_sharing_of_the_batch_says(jobs: list[tuple[int, float]]) -> None:
    lengths, times = [tokens for tokens, _ in jobs], [time for _, time in jobs]
    arrivals = [(time, SimulatedRequest(tokens)) for tokens, time in jobs]
    ended = run(SimulatedEngine(SHAPE), list(arrivals))
    expected = by_hand(lengths, times, SHAPE)
    assert [ended[job] for _, job in arrivals] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=200)
@given(JOBS, st.integers(120, 400), st.integers(0, 40))
def test_small_cache_is_never_overrun_and_all_is_written(
    jobs: list[tuple[int, float]], kv_tokens: int, context: int
) -> None:
    shape = EngineShape(0.01, 0.002, 8, kv_tokens, 1000.0)
    most = 0.0

    class Watched(SimulatedEngine):
        def _move(self, now: float) -> None:
            nonlocal most
            super()._move(now)
            if self.running > 1:
                most = max(most, self.used)

    engine = Watched(shape)
    ended = run(engine, [(time, SimulatedRequest(tokens, context)) for tokens, time in jobs])
    assert len(ended) == len(jobs)
    assert most <= kv_tokens + 1e-6
    assert engine.used == pytest.approx(0.0, abs=1e-6)
    assert engine.decoded == pytest.approx(sum(tokens for tokens, _ in jobs))
    assert engine.prefilled >= len(jobs) * context - 1e-6


def test_retracted_request_is_prefilled_with_what_it_wrote() -> None:
    engine = SimulatedEngine(EngineShape(0.01, 0.0, 8, 200, 1e9))
    run(engine, [(0.0, SimulatedRequest(100.0, 10)), (0.1, SimulatedRequest(100.0, 10))])
    assert engine.retractions == 1
    assert 20 + 60 < engine.prefilled < 20 + 100


def test_cached_tokens_are_not_prefilled_until_evicted() -> None:
    engine = SimulatedEngine(EngineShape(0.01, 0.0, 8, 1000, 1e9))
    siblings = [SimulatedRequest(10.0, 100, ("p", 100), session=i) for i in range(4)]
    run(engine, [(0.0, job) for job in siblings])
    assert engine.prefilled == 100  # once for all siblings
    run(engine, [(engine.now, SimulatedRequest(10.0, 150, ("p", 100), session=0))])
    assert engine.prefilled == 100 + 150 - 110  # a later turn: only what is new
    run(engine, [(engine.now, SimulatedRequest(10.0, 900))])
    before = engine.prefilled
    run(engine, [(engine.now, SimulatedRequest(10.0, 150, None, session=1))])
    assert engine.prefilled - before == 150  # its turn was evicted


def test_nothing_is_written_during_a_pause() -> None:
    engine, job = SimulatedEngine(EngineShape(0.01, 0.0)), SimulatedRequest(50.0)
    engine.submit(job, 0.0)
    engine.pause(0.1)
    assert engine.next_time() == math.inf
    engine.resume(5.0)
    assert engine.next_time() == pytest.approx(5.4)
    assert [one for one in engine.advance(9.0) if one.finished] == [job]
    assert engine.running == 0


def test_a_request_is_seen_every_interval() -> None:
    engine, job, seen = SimulatedEngine(EngineShape(0.01, 0.0)), SimulatedRequest(20.0, interval=8), []
    engine.submit(job, 0.0)
    for time in itertools.takewhile(lambda t: t < 1.0, (engine.next_time() for _ in itertools.count())):
        engine.advance(time)
        seen.append((round(time, 6), job.done))
    assert seen == [(0.08, 8.0), (0.16, 16.0), (0.2, 20.0)]
