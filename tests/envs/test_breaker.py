"""Failures in a row close the way, one episode at a time tries, and who has waited for too long is told why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.envs.breaker import FIRST_PAUSE, LONGEST_PAUSE, UNPROVEN_PATIENCE, Breaker
from asyncrl.errors import AsyncRLError
from tests.fakes import jumping

MOST, PATIENCE = 3, 1000.0


class World:
    """A breaker, its clock, and what it told."""

    def __init__(self) -> None:
        self.now, self.told = 50.0, list[str]()
        self.breaker = Breaker("environment it", MOST, PATIENCE, self.told.append, lambda: self.now)

    async def enters(self) -> bool:
        """Return whether an episode may start at once."""
        task = await self.waits()
        done = task.done()
        task.cancel()
        return done

    async def waits(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.breaker.enter())
        await settle()
        return task

    def fail(self, times: int = MOST) -> None:
        for _ in range(times):
            self.breaker.failed("it raised")

    async def tries(self, seconds: float) -> bool:
        """Return whether an attempt is allowed after this time and not before."""
        self.now += seconds - 0.01
        assert not await self.enters()
        self.now += 0.01
        return await self.enters()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(script: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await script(World())

    asyncio.run(main())


def test_it_opens_at_so_many_failures_in_a_row_and_tells_so_once() -> None:
    async def script(world: World) -> None:
        for _ in range(4):  # never in a row
            world.fail(MOST - 1)
            world.breaker.succeeded()
        world.fail(MOST - 1)
        assert await world.enters()
        assert world.told == []
        world.fail(3)  # of episodes that were under way
        assert not await world.enters()
        assert world.told == ["environment it has failed 3 times in a row; episodes wait: it raised"]

    run(script)


def test_one_episode_tries_and_all_may_when_it_goes_well() -> None:
    async def script(world: World) -> None:
        world.fail()
        assert await world.tries(FIRST_PAUSE)
        waiting = [await world.waits() for _ in range(3)]
        world.now += 10 * LONGEST_PAUSE
        assert not await world.enters()  # while the one tries
        assert not any(task.done() for task in waiting)
        world.breaker.succeeded()
        await settle()
        assert all(task.done() for task in waiting)
        assert "environment it works again, after 60" in world.told[-1]

    run(script)


def test_pauses_double_to_the_longest_and_reset_on_success() -> None:
    async def script(world: World) -> None:
        world.breaker.succeeded()
        world.fail()
        pause = FIRST_PAUSE
        for _ in range(8):
            assert await world.tries(pause)
            world.fail(1)
            pause = min(LONGEST_PAUSE, 2 * pause)
        assert pause == LONGEST_PAUSE
        assert await world.tries(pause)
        world.breaker.succeeded()
        world.fail()
        assert await world.tries(FIRST_PAUSE)

    run(script)


def test_failures_of_episodes_under_way_postpone_no_try() -> None:
    async def script(world: World) -> None:
        world.fail()
        world.fail(30)
        assert await world.tries(FIRST_PAUSE)
        world.fail(1)
        world.fail(30)
        assert await world.tries(2 * FIRST_PAUSE)

    run(script)


def test_last_try_comes_when_the_patience_ends() -> None:
    async def script(world: World) -> None:
        world.fail()
        assert await world.tries(FIRST_PAUSE)
        world.now += UNPROVEN_PATIENCE - 2 * FIRST_PAUSE
        world.fail(1)
        assert await world.tries(FIRST_PAUSE)

    run(script)


def test_who_waits_for_a_try_that_fails_tries_next() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        breaker = Breaker("environment it", MOST, PATIENCE, lambda text: None, loop.time)
        for _ in range(MOST):
            breaker.failed("it raised")
        await breaker.enter()
        waiting = asyncio.create_task(breaker.enter())
        await settle()
        breaker.failed("it raised again")
        await asyncio.wait_for(waiting, LONGEST_PAUSE)
        return loop.time()

    assert jumping(main()) == FIRST_PAUSE + 2 * FIRST_PAUSE


def test_try_without_a_verdict_leaves_its_place() -> None:
    """It was cancelled, say."""

    async def script(world: World) -> None:
        world.fail()
        assert await world.tries(FIRST_PAUSE)
        waiting = [await world.waits() for _ in range(2)]
        world.breaker.left()
        await settle()
        assert [task.done() for task in waiting] == [True, False]
        waiting[1].cancel()

    run(script)


def test_environment_that_never_worked_ends_the_run_soon() -> None:
    async def script(world: World) -> None:
        world.fail()
        world.now += UNPROVEN_PATIENCE + 1
        with pytest.raises(AsyncRLError, match=r"never worked.*: it raised"):
            world.fail(1)

    run(script)


def test_patience_ends_with_the_name_and_the_last_failure() -> None:
    async def script(world: World) -> None:
        world.breaker.succeeded()
        world.fail()
        world.now += PATIENCE
        world.fail(1)
        world.now += 1
        with pytest.raises(AsyncRLError, match=r"environment it has failed 5 times in a row, for 1001 s .*: it raised"):
            world.fail(1)

    run(script)
