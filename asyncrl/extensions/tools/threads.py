"""Sync functions called from an event loop that must not block: each call runs in its own daemon thread.

waits for     a free slot: THREADS concurrent calls
unblocked by  a call that returns, or that nobody waits for any more
on a hang     the caller's time limit cancels the wait. A thread cannot be stopped: it is abandoned and counted, and
              MOST_HANGING of them raise AsyncRLError, which ends the run
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from asyncrl.errors import AsyncRLError, raised_by

THREADS = 64
MOST_HANGING = 64

T = TypeVar("T")


class ThreadRunner:
    """The threads of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._room = asyncio.Semaphore(THREADS)
        self.hanging = 0

    async def call(self, function: Callable[[], T]) -> T:
        """Return the function's result. Its exceptions, KeyboardInterrupt included, become EpisodeFailed("tool", ...),
        unless they are asyncrl's own."""
        if self.hanging >= MOST_HANGING:
            raise AsyncRLError(
                f"{self.hanging} calls of the tool {self._name} have not returned in time and are still running: "
                "check what they wait for"
            )
        async with self._room:
            loop = asyncio.get_running_loop()
            result: asyncio.Future[T] = loop.create_future()
            left = False

            def ended(settle: Callable[[Any], None], value: Any) -> None:
                if left:
                    self.hanging -= 1
                elif not result.done():
                    settle(value)

            def work() -> None:
                settled: tuple[Callable[[Any], None], Any]
                try:
                    with raised_by("tool"):
                        settled = result.set_result, function()
                except AsyncRLError as error:
                    settled = result.set_exception, error
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(ended, *settled)

            run = partial(contextvars.copy_context().run, work)
            threading.Thread(target=run, name=f"tool {self._name}", daemon=True).start()
            try:
                return await result
            except asyncio.CancelledError:
                if not result.done() or result.cancelled():
                    left = True
                    self.hanging += 1
                raise
