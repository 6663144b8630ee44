"""Starting a group waits until there is room, and continues when there is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.engine.loads import Load
from asyncrl.errors import EngineError
from asyncrl.metrics.fields import STEP_ADAPTIVE
from asyncrl.rollout import limiter as module
from asyncrl.rollout.concurrency import ConcurrencyWindow
from asyncrl.rollout.limiter import AdaptiveConcurrency, ConcurrencyLimiter, FixedConcurrency
from tests.fakes import until

IDLE = Load(0, 0, 0, 1000, 0, 0)


async def started(limiter: ConcurrencyLimiter, count: int, size: int = 4) -> list[asyncio.Task[None]]:
    """So many groups want to start."""
    tasks = [asyncio.ensure_future(limiter.acquire(size)) for _ in range(count)]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() for task in tasks)


def in_adaptive_room(
    play: Callable[[AdaptiveConcurrency], Awaitable[None]],
    ask: Callable[[], Awaitable[list[Load]]],
    *,
    holding: bool = False,
) -> None:
    async def main() -> None:
        limiter = AdaptiveConcurrency(ConcurrencyWindow(longest=100))
        watching = asyncio.ensure_future(limiter.watch(ask, lambda: 0.0, lambda: holding))
        try:
            await play(limiter)
        finally:
            watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


async def idle() -> list[Load]:
    return [IDLE]


def test_a_fixed_number_of_groups_run_whatever_their_size() -> None:
    async def main() -> None:
        limiter = FixedConcurrency(2)
        tasks = await started(limiter, 5, size=100)
        assert done(tasks) == 2
        limiter.release(100)
        await until(lambda: done(tasks) == 3)
        [task.cancel() for task in tasks]

    asyncio.run(main())


def test_machine_is_watched_although_engines_do_not_report_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.0)
    seen: list[float] = []

    class Noting(ConcurrencyWindow):
        def observe_machine(self, cores: int, load: float, free: float) -> None:
            seen.append(load)

    async def broken() -> list[Load]:
        raise EngineError("no /get_load")

    async def main() -> None:
        limiter = AdaptiveConcurrency(Noting(longest=100), programs=True)
        watching = asyncio.ensure_future(limiter.watch(broken, lambda: 0.0, lambda: False))
        await until(lambda: len(seen) > 3)
        watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_bound_everyone_starts() -> None:
    async def main() -> None:
        assert done(await started(ConcurrencyLimiter(), 50)) == 50

    asyncio.run(main())


def test_as_many_start_as_fit_for_certain_and_the_next_when_one_ends() -> None:
    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 10)
        assert done(tasks) == 2  # 10 episodes of 100 tokens fit, groups have 4
        limiter.release(4)
        await until(lambda: done(tasks) > 2)
        limiter.give_back(2)
        assert limiter.window.in_play == 4 * done(tasks) - 6
        [task.cancel() for task in tasks]

    in_adaptive_room(play, idle)


def test_nobody_starts_a_second_group_before_the_engines_were_asked_nor_while_weights_change() -> None:
    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 3)
        assert done(tasks) == 1
        [task.cancel() for task in tasks]

    async def silent() -> list[Load]:
        return []

    in_adaptive_room(play, silent)
    in_adaptive_room(play, idle, holding=True)


def test_engines_that_cannot_tell_leave_the_decision_to_the_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    async def too_old() -> list[Load]:
        raise EngineError("engine 1 is too old")

    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 50)
        assert done(tasks) == 50

    in_adaptive_room(play, too_old)
    assert "max_running_groups=auto has no effect: engine 1 is too old" in capsys.readouterr().err


def test_engines_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.0)
    asked = 0

    async def counted() -> list[Load]:
        nonlocal asked
        asked += 1
        return [IDLE]

    async def play(limiter: AdaptiveConcurrency) -> None:
        await until(lambda: asked >= 5)
        assert limiter.figures().keys() == STEP_ADAPTIVE.keys()
        assert limiter.figures()["concurrency/limit"] == 10
        for _ in range(30):
            limiter.taken(ready=50, batch=8, waited=False)
            limiter.window.end(0)
        assert limiter.figures()["concurrency/limit"] == 1

    in_adaptive_room(play, counted)


def test_fixed_number_can_be_changed_while_groups_run() -> None:
    async def main() -> None:
        limiter = FixedConcurrency(1)
        tasks = await started(limiter, 4)
        assert done(tasks) == 1
        limiter.resize(3)
        await until(lambda: done(tasks) == 3)
        limiter.resize(2)
        limiter.release(4)
        assert done([*tasks, *await started(limiter, 1)]) == 3  # two still run
        limiter.release(4)
        await until(lambda: done(tasks) == 4)
        for task in tasks:
            task.cancel()

    asyncio.run(main())
