"""The fixed limit of concurrent groups (rollout.max_running_groups). Extensions have others, for "auto".

waits for     a running group to end; the trainer's batch timeout is the deadline
unblocked by  `release`
"""

from __future__ import annotations

import asyncio

from asyncrl.rollout.groups import ConcurrencyLimiter


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
