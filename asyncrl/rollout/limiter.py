"""Concurrency limits: a group waits here until it may start.

waits for     a running group to end; the trainer's batch timeout is the deadline
unblocked by  `release`
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncrl.engine.loads import Load


class ConcurrencyLimiter:
    """Limiter of concurrent groups, as the worker uses it. This one never blocks: the buffer's admission is the only
    bound."""

    async def acquire(self, episodes: int) -> None:
        """Wait until a group of so many episodes may start."""

    def give_back(self, episodes: int) -> None:
        """Return so many episodes: the group is smaller than announced."""

    def release(self, episodes: int) -> None:
        """Record that a group has ended."""

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """Record that the trainer took a batch of `batch` groups, that it waited or not, and that `ready` groups are
        left."""

    def resize(self, groups: int) -> None:
        """Change a fixed maximum of groups."""

    async def watch(
        self, ask: Callable[[], Awaitable[list[Load]]], needed: Callable[[], float], holding: Callable[[], bool]
    ) -> None:
        """Follow the engines' loads, if the limit depends on them."""

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl."""
        return {}


class FixedConcurrency(ConcurrencyLimiter):
    """Fixed maximum number of concurrent groups."""

    def __init__(self, groups: int) -> None:
        self._most, self._running = groups, 0
        self._changed = asyncio.Event()

    async def acquire(self, episodes: int) -> None:
        """Wait until fewer than the maximum are running."""
        while self._running >= self._most:
            self._changed.clear()
            await self._changed.wait()
        self._running += 1

    def release(self, episodes: int) -> None:
        """Let the next group start."""
        self._running -= 1
        self._changed.set()

    def resize(self, groups: int) -> None:
        """Change the maximum. If more are running, none starts until they have ended."""
        self._most = groups
        self._changed.set()
