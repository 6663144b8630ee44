"""The concurrency rule: bounded and never stuck. tests/extensions/plan/test_concurrency.py simulates how fast it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.loads import Load
from asyncrl.extensions.congestion.window import WASTED, ConcurrencyWindow

SIZE, BATCH = 8, 16
LOADS = st.lists(
    st.builds(
        Load,
        running=st.integers(0, 500),
        waiting=st.integers(0, 500),
        used=st.floats(0, 2e5),
        capacity=st.sampled_from([0.0, 1e5]),
        prefilled=st.floats(0, 1e6),
        prefill_seconds=st.floats(0, 1e4),
    ),
    max_size=3,
)
EVENTS = st.lists(
    st.one_of(LOADS, st.tuples(st.integers(0, 99), st.booleans()), st.just("start"), st.just("start"), st.just("end")),
    max_size=120,
)


@given(EVENTS, st.integers(1, 20))
def test_something_may_always_run_and_never_more_than_the_limit(events: list, size: int) -> None:
    window, playing = ConcurrencyWindow(longest=1000), 0
    for event in events:
        if isinstance(event, list):
            window.observe(event, 1.0, 100.0)
        elif isinstance(event, tuple):
            window.taken(event[0], 8, waited=event[1])
        elif event == "start" and window.may_start(size):
            assert playing == 0 or (playing + 1) * size <= window.limit
            window.start(size)
            playing += 1
        elif event == "end" and playing:
            window.end(size)
            playing -= 1
        assert window.in_play == playing * size
        assert playing or window.may_start(size)


def load(used: float = 0.0, *, running: int = 10, waiting: int = 0, **prefill: float) -> Load:
    return Load(running, waiting, used, 10_000, **({"prefilled": 0.0, "prefill_seconds": 0.0} | prefill))


def fill(window: ConcurrencyWindow) -> None:
    while window.may_start(1):
        window.start(1)


def used_up(window: ConcurrencyWindow, said: Load, times: int = 1) -> float:
    """Its limit after the engine said so many times, each time while all that it allows is in play, and then ends
    once."""
    for _ in range(times):
        window.observe([said], 1.0, 0.0)
        fill(window)
        for _ in range(window.in_play):
            window.end(1)
            fill(window)
    return window.limit


def test_limit_doubles_until_engines_are_full_then_grows() -> None:
    window = ConcurrencyWindow(longest=1000)
    window.observe([load()], 1.0, 0.0)
    assert window.limit == 10
    assert used_up(window, load(0.3)) == pytest.approx(20, abs=2)
    assert used_up(window, load(6000)) == pytest.approx(40, abs=4)
    full = used_up(window, load(9500), 5)
    assert full == pytest.approx(40, abs=4)
    assert used_up(window, load(6000)) == pytest.approx(1.25 * full, rel=0.1)


@pytest.mark.parametrize(("used", "waiting", "grows"), [(3000, 0, True), (3000, 1, False), (9500, 0, False)])
def test_one_engine_with_room_is_reason_to_grow(used: float, waiting: int, grows: bool) -> None:
    window = ConcurrencyWindow(longest=1000)
    used_up(window, load(3000))
    before = window.limit
    fill(window)
    window.observe([load(9900, waiting=5), load(used, waiting=waiting)], 1.0, 0.0)
    window.end(1)
    assert (window.limit > before) is grows


def test_restarted_engine_counts_from_nothing() -> None:
    window = ConcurrencyWindow(longest=100)
    for prefilled in (5000.0, 10.0, 20.0):
        window.observe([load(prefilled=prefilled, prefill_seconds=prefilled / 10)], 1.0, 10.0)
    assert window.wasted == 0.0


def test_limit_falls_once_when_every_queue_is_long() -> None:
    window = ConcurrencyWindow(longest=100)
    used_up(window, load(6000))
    before = window.in_play
    for _ in range(8):
        window.observe([load(5000, running=20, waiting=40)], 1.0, 0.0)
    assert window.limit == pytest.approx(0.8 * before)
    assert window.cuts == 1


def test_limit_falls_when_engines_prefill_again() -> None:
    for needed, cuts in ((1000.0, 0), (100.0, 1)):
        window = ConcurrencyWindow(longest=100)
        used_up(window, load(6000))
        for second in range(1, 11):
            said = load(9500, prefilled=1000.0 * second, prefill_seconds=0.9 * second)
            window.observe([said], 1.0, needed)
        assert window.cuts == cuts
        assert window.wasted == pytest.approx(0.0 if cuts == 0 else 0.9 * 0.9 * (1 - 0.9**10), abs=1e-9)


def test_prefill_that_comes_long_after_its_request_is_no_waste() -> None:
    """A slow engine, which does nothing else, prefills what was asked several observations before."""
    window, prefilled = ConcurrencyWindow(longest=100), 0.0
    for second in range(100):
        prefilled += 3000.0 * (second % 4 == 0)
        said = load(prefilled=prefilled, prefill_seconds=float(second))
        window.observe([said], 1.0, 3000.0 * (second % 4 == 1))
        assert window.wasted < WASTED
    assert window.cuts == 0


def test_a_burst_that_waits_to_be_prefilled_changes_nothing() -> None:
    window = ConcurrencyWindow(longest=100)
    used_up(window, load(1000))
    before = window.limit
    for waiting in (100, 100, 0, 100, 100, 0):
        window.observe([load(1000, waiting=waiting)], 1.0, 0.0)
    assert window.limit == before


def test_fewer_play_while_batches_pile_up() -> None:
    """The limit falls once in a generation: the groups that were outstanding when it fell show nothing of it."""
    window = ConcurrencyWindow(longest=100)
    used_up(window, load(1000))

    def generation(*, waits: bool = False) -> list[float]:
        limits = []
        for step in range((window._groups + 40) // 8):
            for _ in range(8):
                window.end(1)
                window.start(1)
            window.taken(ready=40, batch=8, waited=waits and step == 0)
            limits.append(window.limit)
        return limits

    everything = window.limit
    for number in range(1, 5):
        limits = generation()
        assert limits == [pytest.approx(0.8**number * everything)] * len(limits)
    before = window.limit
    limits = generation(waits=True)
    assert limits == [1.5 * before] * len(limits)
    for _ in range(10):
        window.taken(ready=0, batch=8, waited=True)
    assert window.limit == window.engines


def test_programs_start_a_few_per_core_and_fewer_under_load() -> None:
    """Engines with room for all, whose limit alone would start everything at once."""
    window = ConcurrencyWindow(1)
    window.observe([load()], 1.0, 0.0)
    window.observe_machine(2, 0.5, 0.9)
    fill(window)
    assert window.in_play == 8
    for _ in range(8):
        window.end(1)
        fill(window)
    assert window.in_play > 8  # they were replaced while the machine had room
    before = window.in_play
    window.observe_machine(2, 9.0, 0.9)
    assert window.limit < before
    for _ in range(before):
        window.end(1)
    window.observe_machine(2, 0.5, 0.05)
    assert window.limit == 1.0
    assert window.may_start(16)  # one group always may
