"""A sandbox that is a plain process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from asyncrl.extensions.sandbox.protocol import Outcome


class Plain:
    """Runs commands as this user, without any walls: the harness has to hold by itself."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] = {}
    ) -> Outcome:
        started = time.monotonic()
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(*command, **pipes, env=env or None)
        self._sandboxes.started.append(process.pid)
        reason = "exited"
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), seconds)
        except TimeoutError:
            reason, out, err = "timeout", b"", b""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return Outcome(reason, process.returncode, out, err, time.monotonic() - started)

    async def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        raise NotImplementedError

    async def close(self) -> None:
        self._sandboxes.open_now -= 1


class Sandboxes:
    """Source of sandboxes. `fault` is called before each is opened, and what it returns is raised."""

    def __init__(self, fault: Callable[[], Exception | None] = lambda: None) -> None:
        self._fault = fault
        self.started: list[int] = []
        self.opened = self.open_now = self.most = 0
        self.closed = False

    async def open(self) -> Plain:
        if error := self._fault():
            raise error
        self.opened += 1
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        return Plain(self)

    async def close(self) -> None:
        self.closed = True
