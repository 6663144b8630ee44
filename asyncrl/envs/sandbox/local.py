"""Sandboxes on this machine, under the first of three mechanisms that works here.

bubblewrap   namespaces and a root of its own, made by the program of that name
namespaces   the same, made by us
processes    no isolation: a uid of its own at best, and resource limits. Only where `allow_unsafe` says so; on other
             machines that give no namespaces nothing is run (docs/sandbox.md)

waits for     its spawner and its supervisors (spawning.py, session.py)
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from itertools import count
from typing import Literal

from asyncrl.envs.sandbox import view
from asyncrl.envs.sandbox.protections import Protections, in_force
from asyncrl.envs.sandbox.protocol import Limits, run_python
from asyncrl.envs.sandbox.session import LocalSandbox
from asyncrl.envs.sandbox.spawning import Spawning
from asyncrl.envs.sandbox.starts import Order
from asyncrl.errors import ConfigError, EpisodeFailed

Kind = Literal["bubblewrap", "namespaces", "processes"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces", "processes")
UNSAFE: Kind = "processes"
WITH_NAMESPACES = "Let this user make user namespaces (docs/sandbox.md)"
REMEDY = (
    f"{WITH_NAMESPACES}, or set allow_unsafe=true in the sandbox_params of what runs the code: little more than "
    "resource limits then protects the machine from it."
)
OPENING = 32
"""Sandboxes that are being made at once; more wait in this process."""
_noted: ContextVar[list[LocalSandboxes] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[list[LocalSandboxes]]:
    """The backends that are made within, whoever makes them: what a run's settings want of the machine."""
    found: list[LocalSandboxes] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


class LocalSandboxes:
    """A backend, of one event loop."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        warm: int = 0,
        require: Collection[str] = (),
        kinds: Sequence[Kind] = KINDS,
        allow_unsafe: bool = False,
        nested: bool = False,
    ) -> None:
        """`warm` sandboxes are kept ready; `require`: names of protections.NAMES without which there is none; `kinds`:
        which mechanisms to try, in this order, `processes` only with `allow_unsafe`; `nested`: guests may have programs
        started beside them (beside.py)."""
        if (found := _noted.get()) is not None:
            found.append(self)
        self._allow_unsafe, self._nested = allow_unsafe, nested
        self._limits, self._warm, self._require, self._kinds = limits or Limits(), warm, require, kinds
        self._numbers = count(1)
        self._starting, self._opening = asyncio.Lock(), asyncio.Semaphore(OPENING)
        self._spawning: Spawning | None = None
        self.protections: Protections | None = None
        self._ready: deque[LocalSandbox] = deque()
        self._all: set[LocalSandbox] = set()
        self._filling: set[asyncio.Task[None]] = set()
        self._closed = False

    async def describe(self) -> Protections:
        """What is in force here; begins to fill the warm pool.

        Raises ConfigError when that is less than `require`, or no isolation; EpisodeFailed when no mechanism works.
        """
        self._refill(await self._started())
        assert self.protections
        return self.protections

    async def open(self) -> LocalSandbox:
        """See protocol.SandboxBackend; also raises ConfigError, as `describe` does."""
        spawning = await self._started()
        while self._ready and not self._ready[0].usable:
            self._ready.popleft().kill("it died while it was waited for")
        sandbox = self._ready.popleft() if self._ready else await self._make(spawning)
        self._refill(spawning)
        return sandbox

    async def close(self) -> None:
        """See protocol.SandboxBackend."""
        self._closed = True
        async with self._starting:
            for task in self._filling:
                task.cancel()
            await asyncio.gather(*self._filling, return_exceptions=True)
            for sandbox in self._all:
                sandbox.kill("its backend was closed")
            if self._spawning:
                await self._spawning.end()

    async def _started(self) -> Spawning:
        async with self._starting:
            if self._closed:
                raise EpisodeFailed("sandbox", "the backend is closed")
            if self._spawning and self._spawning.alive:
                return self._spawning
            if self._spawning:  # it has died: the next one is of the same kind
                await self._spawning.end()
            self._spawning, self.protections = await self._start()
            return self._spawning

    async def _start(self) -> tuple[Spawning, Protections]:
        refusals: list[str] = []
        for kind in [self.protections.kind] if self.protections else self._kinds:
            if kind == UNSAFE and not self._allow_unsafe:
                why = "; ".join(refusals) or "there is none under 'processes'"
                raise ConfigError("allow_unsafe", False, f"Code of the model has no isolation here: {why}. {REMEDY}")
            try:
                spawning, protections = await self._try(kind)
            except EpisodeFailed as error:
                refusals.append(f"{kind}: {error}")
                continue
            if missing := protections.missing(self._require):
                await spawning.end()
                remedy = f"No {' and no '.join(missing)} here:\n{protections}\n" + "\n".join(refusals)
                raise ConfigError("require", list(self._require), remedy)
            return spawning, protections
        raise EpisodeFailed("sandbox", "no mechanism works here: " + "; ".join(refusals))

    async def _try(self, kind: str) -> tuple[Spawning, Protections]:
        """A spawner of this kind that has proved that a Python runs in what it makes. Raises EpisodeFailed."""
        bwrap = shutil.which("bwrap") or ""
        if kind == "bubblewrap" and not bwrap:
            raise EpisodeFailed("sandbox", "bwrap is not on PATH")
        spawning, works = Spawning(self._order(kind, bwrap)), False
        try:
            facts = await spawning.facts()
            first = await self._make(spawning)
            outcome = await run_python(first, "")
            if not outcome.ok:
                said = outcome.stderr.decode(errors="replace").strip()
                raise EpisodeFailed("sandbox", f"Python does not run in it ({outcome.reason}): {said}")
            works = True
            self._ready.append(first)
            return spawning, in_force(kind, **facts)
        finally:
            if not works:
                await spawning.end()

    def _order(self, kind: str, bwrap: str) -> Order:
        limits, environment = asdict(self._limits), view.environment()
        return Order(kind, os.getpid(), limits, bwrap, view.shown(), environment, self._nested)

    async def _make(self, spawning: Spawning) -> LocalSandbox:
        async with self._opening:
            sandbox = await LocalSandbox.open(spawning, next(self._numbers), self._limits)
        self._all = {sandbox, *(other for other in self._all if other.usable)}
        return sandbox

    def _refill(self, spawning: Spawning) -> None:
        for _ in range(self._warm - len(self._ready) - len(self._filling)):
            task = asyncio.ensure_future(self._fill(spawning))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    async def _fill(self, spawning: Spawning) -> None:
        with suppress(EpisodeFailed):  # the next open fails by itself, and says why
            self._ready.append(await self._make(spawning))
