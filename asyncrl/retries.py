"""Retries: exponential backoff. The delays have jitter, so that clients do not all retry at the same moment."""

from __future__ import annotations

import asyncio
import random

from asyncrl.errors import EngineError

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0


async def pause(number: int, *, first: float = FIRST_DELAY, longest: float = LONGEST_DELAY) -> None:
    """Wait before another attempt. `number` counts the earlier pauses. The first takes at most `first` seconds, each
    further one up to twice as long as that before it, and none more than `longest`."""
    delay = min(longest, first * 2 ** min(number, 16))
    await asyncio.sleep(delay * random.uniform(0.5, 1.0))


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
