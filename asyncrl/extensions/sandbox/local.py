"""The backend of sandboxes on this machine, which are made by bubblewrap.

Where bubblewrap cannot run, `allow_unsafe` lets programs run without isolation: with only resource limits and the
system-call filter, and, if the owner is root, with a uid of their own.

waits for     its sandboxes (session.py)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from contextlib import suppress

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.sandbox.protections import Protections
from asyncrl.extensions.sandbox.protocol import Limits, run_python
from asyncrl.extensions.sandbox.session import LocalSandbox
from asyncrl.extensions.sandbox.start import SandboxStarter, ways
from asyncrl.user_code import announce

FOR_ISOLATION = (
    "Install bubblewrap (or run `make bubblewrap`) and let this user create namespaces "
    "(asyncrl/extensions/sandbox/README.md)"
)
REMEDY = (
    f"{FOR_ISOLATION}, or set allow_unsafe=true in the sandbox_params of the task or tool that runs the code: then "
    "little more than resource limits protects the machine from it."
)
OPENING = 32
"""Number of sandboxes that may be starting at the same time."""


class LocalSandboxes:
    """Sandbox backend (protocol.SandboxBackend) that belongs to one event loop."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        warm: int = 0,
        require: Collection[str] = (),
        allow_unsafe: bool = False,
        nested: bool = False,
    ) -> None:
        """Configure the backend.

        warm          number of sandboxes that are kept ready
        require       protections (protections.NAMES) without which no sandbox is opened
        allow_unsafe  run programs without isolation where bubblewrap cannot run
        nested        let programs start other programs in a second sandbox beside their own (worker.py)
        """
        announce(self)
        self._limits, self._warm, self._require = limits or Limits(), warm, require
        self._allow_unsafe, self._nested = allow_unsafe, nested
        self._choosing, self._opening = asyncio.Lock(), asyncio.Semaphore(OPENING)
        self._starter: SandboxStarter | None = None
        self._ready: deque[LocalSandbox] = deque()
        self._all: set[LocalSandbox] = set()
        self._filling: set[asyncio.Task[None]] = set()
        self._closed = False

    async def describe(self) -> Protections:
        """Return the protections that hold on this machine, and begin to fill the warm pool.

        Raises ConfigError if a required protection or isolation is missing; EpisodeFailed if no sandbox works.
        """
        starter = await self._chosen()
        self._refill(starter)
        return starter.protections

    async def open(self) -> LocalSandbox:
        """See protocol.SandboxBackend; also raises ConfigError, as `describe` does."""
        starter = await self._chosen()
        while self._ready and not self._ready[0].usable:
            self._ready.popleft().kill("the worker died before the sandbox was used")
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
                sandbox.kill("the backend of the sandbox was closed")
            await asyncio.gather(*(sandbox.close() for sandbox in self._all), return_exceptions=True)

    async def _chosen(self) -> SandboxStarter:
        async with self._choosing:
            if self._closed:
                raise EpisodeFailed("sandbox", "the backend is closed; it opens no more sandboxes")
            self._starter = self._starter or await self._choose()
            return self._starter

    async def _choose(self) -> SandboxStarter:
        """Return the first starter that works, tested by running Python in one of its sandboxes."""
        found, why = ways(self._allow_unsafe)
        refusals = [f"bubblewrap: {why}"] if why else []
        for way in found:
            try:
                starter = SandboxStarter(way, self._limits, nested=self._nested)
                first = await self._make(starter)
                outcome = await run_python(first, "")
                if not outcome.ok:
                    said = outcome.stderr.decode(errors="replace").strip()
                    raise EpisodeFailed("sandbox", f"Python does not run in the sandbox ({outcome.reason}): {said}")
            except EpisodeFailed as error:
                refusals.append(f"{way.kind}: {error}")
                continue
            if missing := starter.protections.missing(self._require):
                remedy = f"This machine lacks {', '.join(missing)}:\n{starter.protections}\n" + "\n".join(refusals)
                raise ConfigError("require", list(self._require), remedy)
            self._ready.append(first)
            return starter
        why = "; ".join(refusals)
        if self._allow_unsafe:
            raise EpisodeFailed("sandbox", f"no sandbox works on this machine: {why}")
        raise ConfigError("allow_unsafe", False, f"This machine cannot isolate code of the model: {why}. {REMEDY}")

    async def _make(self, starter: SandboxStarter) -> LocalSandbox:
        async with self._opening:
            sandbox = starter.start()
            self._all = {sandbox, *(other for other in self._all if not other.removed)}
            return await sandbox.ready()

    def _refill(self, starter: SandboxStarter) -> None:
        filling = sum(not task.done() for task in self._filling)  # a sandbox of a task that has ended is ready
        for _ in range(self._warm - len(self._ready) - filling):
            task = asyncio.ensure_future(self._fill(starter))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    async def _fill(self, starter: SandboxStarter) -> None:
        with suppress(EpisodeFailed):  # the next `open` fails with the same reason
            self._ready.append(await self._make(starter))
