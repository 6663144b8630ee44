"""Room for groups: who wants to start one waits here.

waits for     a group to end, or the window to widen; the deadline is the trainer's, for its batch
unblocked by  `leave`, and `watch`, which asks the engines every PERIOD seconds
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from asyncrl.engine.loads import Load
from asyncrl.errors import EngineError
from asyncrl.rollout.concurrency import Window

PERIOD = 1.0


class Room(Protocol):
    """What the worker uses."""

    async def enter(self, episodes: int) -> None:
        """Wait until a group of so many episodes may start."""
        ...

    def give_back(self, episodes: int) -> None:
        """The group has so many fewer."""
        ...

    def leave(self, episodes: int) -> None:
        """A group has ended."""
        ...

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """The trainer took a batch of so many groups, for which it had to wait or not; so many are ready beyond it."""
        ...

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl."""
        ...


class Unbounded:
    """The buffer's admission is the only bound."""

    async def enter(self, episodes: int) -> None:
        """At once."""

    def give_back(self, episodes: int) -> None:
        """Nobody waits."""

    def leave(self, episodes: int) -> None:
        """Nobody waits."""

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """No matter."""

    def figures(self) -> dict[str, float]:
        """None."""
        return {}


class Fixed(Unbounded):
    """So many groups at once."""

    def __init__(self, groups: int) -> None:
        self._free = asyncio.Semaphore(groups)

    async def enter(self, episodes: int) -> None:
        """Wait for another group's end."""
        await self._free.acquire()

    def leave(self, episodes: int) -> None:
        """The next may start."""
        self._free.release()


class Adaptive:
    """As many as the window allows."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.loads: list[Load] = []
        self._changed = asyncio.Event()

    async def enter(self, episodes: int) -> None:
        """Wait for another group's end, or for the engines to have room."""
        while not self.window.may_start(episodes):
            self._changed.clear()
            await self._changed.wait()
        self.window.start(episodes)

    def give_back(self, episodes: int) -> None:
        """The group is smaller than it might have been."""
        if episodes:
            self.window.start(-episodes)
            self._changed.set()

    def leave(self, episodes: int) -> None:
        """The window may have room."""
        self.window.end(episodes)
        self._changed.set()

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """The trainer took a batch."""
        self.window.taken(ready, batch, waited=waited)
        self._changed.set()

    async def watch(
        self, ask: Callable[[], Awaitable[list[Load]]], needed: Callable[[], float], holding: Callable[[], bool]
    ) -> None:
        """Tell the window what the engines say, until cancelled; not while weights change. `needed`: tokens that had to
        be prefilled since it was last asked."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            try:
                self.loads = await ask()
            except EngineError as error:
                print(f"asyncrl: rollout.max_running_groups=auto has no effect: {error}", file=sys.stderr, flush=True)
                self.window.open()
                self._changed.set()
                return
            if not holding():
                now = loop.time()
                self.window.observe(self.loads, now - before, needed())
                before = now
                self._changed.set()
            await asyncio.sleep(PERIOD)

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl."""
        capacity = sum(load.capacity for load in self.loads)
        return {
            "concurrency/limit": min(self.window.limit, 1e9),
            "concurrency/in_play": self.window.in_play,
            "concurrency/cuts": self.window.cuts,
            "engines/running": sum(load.running for load in self.loads),
            "engines/queued": sum(load.waiting for load in self.loads),
            "engines/cache_use": sum(load.used for load in self.loads) / capacity if capacity else 0.0,
            "engines/prefill_wasted": self.window.wasted,
        }
