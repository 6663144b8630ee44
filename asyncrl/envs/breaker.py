"""Circuit breaker that stops a broken environment from consuming prompts, and names it.

closed   consecutive failures are counted; `most` of them open the breaker
open     episodes wait; after a pause, which doubles each time, one of them tries, and closes the breaker if it succeeds
end      after `patience` seconds without a success, the run ends with the environment's name and last failure; after
         half a minute if no episode has succeeded yet, since an error in the code will not go away
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from asyncrl.errors import AsyncRLError

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
UNPROVEN_PATIENCE = 30.0
"""Longest patience in seconds with an environment that has never worked."""


class Breaker:
    """Circuit breaker of one environment."""

    def __init__(
        self,
        name: str,
        most: int,
        patience: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a closed breaker. `tell` is called with a message when it opens and when it closes."""
        self._name = name
        self._most = most
        self._patience = patience
        self._tell = tell
        self._clock = clock
        self._failures, self._pause = 0, FIRST_PAUSE
        self._opened: float | None = None
        self._next_try = 0.0
        self._trying = False
        self._proven = False
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Wait until an episode may start: at once if the breaker is closed, else when it closes or when this episode
        may try."""
        while self._opened is not None:
            left = self._next_try - self._clock()
            if left <= 0 and not self._trying:
                self._trying = True
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if self._trying else max(left, 0.0))

    def succeeded(self) -> None:
        """Record that an episode ended normally."""
        if self._opened is not None:
            self._tell(f"{self._name} works again, after {self._clock() - self._opened:.0f} s")
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._opened = None
        self._trying = False
        self._proven = True
        self._wake()

    def failed(self, detail: str) -> None:
        """Record that an episode failed in the environment. Raises AsyncRLError if that goes on for too long."""
        self._failures += 1
        now = self._clock()
        if self._opened is None and self._failures >= self._most:
            self._opened = now
            self._trying = True  # in a sense: this failure decides when the next one tries
            self._tell(f"{self._name} has failed {self._failures} times in a row; episodes wait: {detail}")
        if self._opened is None:
            return
        patience = self._patience if self._proven else min(self._patience, UNPROVEN_PATIENCE)
        if now - self._opened > patience:
            limit = "task.environments.patience" if patience == self._patience else "it has never worked"
            raise AsyncRLError(
                f"{self._name} has failed {self._failures} times in a row, for {now - self._opened:.0f} s ({limit}); "
                f"the last failure: {detail}"
            )
        if self._trying:  # otherwise it is one of the episodes that began before, which change nothing
            self._next_try = min(now + self._pause, self._opened + patience)
            self._trying = False
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            self._wake()

    def left(self) -> None:
        """Record that an episode left without a verdict, so that another one may try."""
        self._trying = False
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
