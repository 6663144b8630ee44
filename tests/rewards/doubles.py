"""Hand-made stand-ins: an episode's answer, and a sandbox that is a plain process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.rewards import RewardInput
from asyncrl.sandbox.protocol import Outcome
from asyncrl.schema import Completion, Trajectory, Turn, VersionSpan


def answer(*texts: str, messages: Sequence[Mapping[str, Any]] = (), **record: Any) -> RewardInput:
    """Return the input of a reward: an episode with these completions, for a row of a file."""
    turns = [Turn([], Completion([place], [-0.5], [VersionSpan(0, 0, 1)], "stop")) for place in range(len(texts))]
    return RewardInput(texts[-1], texts, {**record, "messages": list(messages)}, Trajectory(turns))


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


class Fixed:
    """Says always the same, or raises it; counts what is asked, begun, ended and closed."""

    def __init__(self, says: Any, inline: bool = True, pure: bool = True) -> None:
        self.says, self.inline, self.pure = says, inline, pure
        self.asked = 0
        self.closed = False

    def __call__(self, one: RewardInput) -> Any:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says(one) if callable(self.says) else self.says

    async def close(self) -> None:
        self.closed = True


class Later(Fixed):
    """The same, async; waits for `until` first."""

    def __init__(self, says: Any, until: asyncio.Event | None = None) -> None:
        super().__init__(says)
        self.until = until
        self.begun = self.cancelled = 0
        self.beginning = asyncio.Semaphore(0)  # once for each that has begun

    def __call__(self, one: RewardInput) -> Any:
        self.asked += 1
        return self._later(one)

    async def _later(self, one: RewardInput) -> Any:
        self.begun += 1
        self.beginning.release()
        try:
            if self.until:
                await self.until.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.asked -= 1
        return super().__call__(one)
