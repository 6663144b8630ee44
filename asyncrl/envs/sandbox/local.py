"""Sandboxes on this machine: made by bubblewrap, or none.

Where bubblewrap cannot run, `allow_unsafe` allows programs without isolation: under resource limits and the system-call
filter alone, and if the owner is root with a uid of their own.

waits for     its sandboxes (session.py)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from asyncrl.envs.sandbox.protections import Protections
from asyncrl.envs.sandbox.protocol import Limits, run_python
from asyncrl.envs.sandbox.session import LocalSandbox
from asyncrl.envs.sandbox.start import SandboxStarter, ways
from asyncrl.errors import ConfigError, EpisodeFailed

FOR_ISOLATION = "Install bubblewrap (or run `make bubblewrap`) and let this user make namespaces (docs/sandbox.md)"
REMEDY = (
    f"{FOR_ISOLATION}, or set allow_unsafe=true in the sandbox_params of what runs the code: little more than resource "
    "limits then protects the machine from it."
)
OPENING = 32
"""Sandboxes that are being made at once."""
_noted: ContextVar[list[LocalSandboxes] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[list[LocalSandboxes]]:
    """Collect the backends that are made within: what a run's settings want of the machine."""
    found: list[LocalSandboxes] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


class LocalSandboxes:
    """A backend (protocol.SandboxBackend), of one event loop."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        warm: int = 0,
        require: Collection[str] = (),
        allow_unsafe: bool = False,
        nested: bool = False,
    ) -> None:
        """Configure it.

        warm          number of sandboxes that are kept ready
        require       names of protections.NAMES without which there is none
        allow_unsafe  run programs without isolation where bubblewrap cannot run
        nested        programs may have others started in a sandbox beside theirs (worker.py)
        """
        if (found := _noted.get()) is not None:
            found.append(self)
        self._limits, self._warm, self._require = limits or Limits(), warm, require
        self._allow_unsafe, self._nested = allow_unsafe, nested
        self._choosing, self._opening = asyncio.Lock(), asyncio.Semaphore(OPENING)
        self._starter: SandboxStarter | None = None
        self._ready: deque[LocalSandbox] = deque()
        self._all: set[LocalSandbox] = set()
        self._filling: set[asyncio.Task[None]] = set()
        self._closed = False

    async def describe(self) -> Protections:
        """Return what is in force here, and begin to fill the warm pool.

        Raises ConfigError when that is less than `require`, or no isolation; EpisodeFailed when nothing works.
        """
        starter = await self._chosen()
        self._refill(starter)
        return starter.protections

    async def open(self) -> LocalSandbox:
        """See protocol.SandboxBackend; also raises ConfigError, as `describe` does."""
        starter = await self._chosen()
        while self._ready and not self._ready[0].usable:
            self._ready.popleft().kill("it died while it was waited for")
        sandbox = self._ready.popleft() if self._ready else await self._make(starter)
        self._refill(starter)
        return sandbox

    async def close(self) -> None:
        """See protocol.SandboxBackend."""
        self._closed = True
        async with self._choosing:
            for task in self._filling:
                task.cancel()
            await asyncio.gather(*self._filling, return_exceptions=True)
            for sandbox in self._all:
                sandbox.kill("its backend was closed")
            await asyncio.gather(*(sandbox.close() for sandbox in self._all), return_exceptions=True)

    async def _chosen(self) -> SandboxStarter:
        async with self._choosing:
            if self._closed:
                raise EpisodeFailed("sandbox", "the backend is closed")
            self._starter = self._starter or await self._choose()
            return self._starter

    async def _choose(self) -> SandboxStarter:
        """Return a starter that works: Python has run in one of its sandboxes."""
        found, why = ways(self._allow_unsafe)
        refusals = [f"bubblewrap: {why}"] if why else []
        for way in found:
            try:
                starter = SandboxStarter(way, self._limits, nested=self._nested)
                first = await self._make(starter)
                outcome = await run_python(first, "")
                if not outcome.ok:
                    said = outcome.stderr.decode(errors="replace").strip()
                    raise EpisodeFailed("sandbox", f"Python does not run in it ({outcome.reason}): {said}")
            except EpisodeFailed as error:
                refusals.append(f"{way.kind}: {error}")
                continue
            if missing := starter.protections.missing(self._require):
                remedy = f"No {' and no '.join(missing)} here:\n{starter.protections}\n" + "\n".join(refusals)
                raise ConfigError("require", list(self._require), remedy)
            self._ready.append(first)
            return starter
        why = "; ".join(refusals)
        if self._allow_unsafe:
            raise EpisodeFailed("sandbox", f"no sandbox works here: {why}")
        raise ConfigError("allow_unsafe", False, f"Code of the model has no isolation here: {why}. {REMEDY}")

    async def _make(self, starter: SandboxStarter) -> LocalSandbox:
        async with self._opening:
            sandbox = starter.start()
            self._all = {sandbox, *(other for other in self._all if not other.removed)}
            return await sandbox.ready()

    def _refill(self, starter: SandboxStarter) -> None:
        for _ in range(self._warm - len(self._ready) - len(self._filling)):
            task = asyncio.ensure_future(self._fill(starter))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    async def _fill(self, starter: SandboxStarter) -> None:
        with suppress(EpisodeFailed):  # the next open fails by itself, and says why
            self._ready.append(await self._make(starter))
