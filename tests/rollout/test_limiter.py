"""Starting a group waits until there is room, and continues when there is."""

from __future__ import annotations

import asyncio

from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.limiter import FixedConcurrency
from tests.fakes import until
from tests.rollout.working import done, started


def test_a_fixed_number_of_groups_run_whatever_their_size() -> None:
    async def main() -> None:
        limiter = FixedConcurrency(2)
        tasks = await started(limiter, 5, size=100)
        assert done(tasks) == 2
        limiter.release(100)
        await until(lambda: done(tasks) == 3)
        [task.cancel() for task in tasks]

    asyncio.run(main())


def test_without_bound_everyone_starts() -> None:
    async def main() -> None:
        assert done(await started(ConcurrencyLimiter(), 50)) == 50

    asyncio.run(main())


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
