"""The limit that follows the window: it asks the engines, and a group waits here until it may start.

waits for     a running group to end, or the window to grow; the trainer's batch timeout is the deadline
unblocked by  `release`, and `watch`, which polls the engines every PERIOD seconds or less often
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import psutil

from asyncrl.engine.loads import Load
from asyncrl.errors import EngineError
from asyncrl.extensions.congestion.window import ConcurrencyWindow
from asyncrl.rollout.groups import ConcurrencyLimiter

PERIOD, AT_ONCE = 1.0, 64
"""Seconds between two queries of so many engines; with more of them the time grows. A query takes 1 ms here."""


def machine() -> tuple[int, float, float]:
    """Return the cores that this process may use, how many processes wanted to run in the last minute, and the fraction
    of the memory that is free."""
    memory = psutil.virtual_memory()
    return len(os.sched_getaffinity(0)), os.getloadavg()[0], memory.available / memory.total


class AdaptiveConcurrency(ConcurrencyLimiter):
    """Limit that follows the window (window.py)."""

    def __init__(self, window: ConcurrencyWindow, *, programs: bool = False) -> None:
        """`programs`: each episode starts a program on this machine, whose load and memory then count, too."""
        self.window = window
        self._programs = programs
        self._changed = asyncio.Event()

    async def acquire(self, episodes: int) -> None:
        """Wait until another group ends or the engines have capacity."""
        while not self.window.may_start(episodes):
            self._changed.clear()
            await self._changed.wait()
        self.window.start(episodes)

    def give_back(self, episodes: int) -> None:
        """Return so many episodes to the window."""
        if episodes:
            self.window.start(-episodes)
            self._changed.set()

    def release(self, episodes: int) -> None:
        """Return the group's episodes to the window."""
        self.window.end(episodes)
        self._changed.set()

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """Pass the trainer's batch on to the window."""
        self.window.taken(ready, batch, waited=waited)
        self._changed.set()

    async def watch(
        self, ask: Callable[[], Awaitable[list[Load]]], needed: Callable[[], float], holding: Callable[[], bool]
    ) -> None:
        """Report the engines' loads to the window until cancelled, except while weights change. `needed` returns the
        tokens that had to be prefilled since its last call."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            if self._programs:
                self.window.observe_machine(*machine())
            try:
                loads = await ask()
            except EngineError as error:
                print(f"asyncrl: rollout.max_running_groups=auto has no effect: {error}", file=sys.stderr, flush=True)
                self.window.open()
                self._changed.set()
                break
            if not holding():
                now = loop.time()
                self.window.observe(loads, now - before, needed())
                before = now
                self._changed.set()
            await asyncio.sleep(PERIOD * max(1.0, len(loads) / AT_ONCE))
        while self._programs:  # this machine's load does not depend on what engines report
            self.window.observe_machine(*machine())
            self._changed.set()
            await asyncio.sleep(PERIOD)

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl."""
        return {
            "concurrency/limit": min(self.window.limit, 1e9),
            "concurrency/in_play": self.window.in_play,
            "concurrency/cuts": self.window.cuts,
            "engines/prefill_wasted": self.window.wasted,
        }
