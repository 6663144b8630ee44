"""Retries: exponential backoff, and the choice among equivalent servers.

When a server fails, a request moves to another one at once. When all of them have failed, it waits. The delays grow and
have jitter, so that clients do not all retry at the same moment.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.errors import EngineError

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
REST_SECONDS = 5.0
"""Time for which a server that has failed is chosen last."""


async def pause(number: int, *, first: float = FIRST_DELAY, longest: float = LONGEST_DELAY) -> None:
    """Wait before another attempt. `number` counts the earlier pauses. The first takes at most `first` seconds, each
    further one up to twice as long as that before it, and none more than `longest`."""
    delay = min(longest, first * 2 ** min(number, 16))
    await asyncio.sleep(delay * random.uniform(0.5, 1.0))


class EquivalentServers:
    """Servers of which any may answer the requests of one event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._failed_at: dict[str, float] = {}

    def pick(self, preference: Callable[[str], Any]) -> str:
        """Return the server with the smallest preference.

        Servers that failed recently are chosen last; among them, the one whose failure is the oldest comes first.
        """
        now = asyncio.get_running_loop().time()

        def rank(url: str) -> tuple[float, Any]:
            failed = self._failed_at.get(url, -math.inf)
            return failed if now - failed < REST_SECONDS else -math.inf, preference(url)

        return min(self.urls, key=rank)

    async def failed(self, url: str, failures: int) -> None:
        """Record a request's `failures`-th failure. Pause if every server has failed since the last pause."""
        self._failed_at[url] = asyncio.get_running_loop().time()
        if failures % len(self.urls) == 0:
            await pause(failures // len(self.urls) - 1)


class Patience:
    """Retries of one streamed answer: exponential backoff until no token has arrived for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fruitless = 0
        self._since: float | None = None  # time of the first retry since a token arrived

    async def before_retry(self, reason: str, *, progressed: bool) -> None:
        """Wait before the next attempt. Raises EngineError with the reason when no token has arrived for too long."""
        now = asyncio.get_running_loop().time()
        if progressed or self._since is None:
            self._fruitless = 0
            self._since = now
        elif now - self._since > self._seconds:
            raise EngineError(
                f"no token arrived for {now - self._since:.0f} s in {self._fruitless + 1} attempts; the last one "
                f"failed: {reason}"
            )
        self._fruitless += 1
        if self._fruitless > 1:
            await pause(self._fruitless - 2)
