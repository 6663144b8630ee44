"""Worker processes that answer one request at a time, and are killed when they do not answer.

They start with the first request, because most runs do not need them, and are restarted when they have ended.

waits for     a free process, then its lines (`seconds` of wall-clock time, which does not measure the work: a worker
              has a limit of its own)
unblocked by  a process that answers, ends, or is killed
on a hang     the process is killed, also when the caller stops waiting
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

from asyncrl.child import ChildProcess


@dataclass(frozen=True)
class Reply:
    """Lines of a process in reply to a request, and its exit status if it ended."""

    lines: list[dict[str, Any]]
    exit_code: int | None = None  # negative: the signal number
    late: bool = False


class RewardWorker:
    """Process of a pool."""

    def __init__(self, child: ChildProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._child, self._stdin, self._stdout = child, stdin, stdout

    @classmethod
    async def start(cls, command: Sequence[str]) -> RewardWorker:
        """Start a process."""
        child = ChildProcess(command, stdin=PIPE, stdout=PIPE)
        async with child.ended_on_error():
            return cls(child, await child.writer(), await child.reader())

    async def ask(self, request: dict[str, Any], until: str, lines: list[dict[str, Any]]) -> Reply:
        """Append the lines of the reply as they come. Returns the reply, which is complete if the process lives."""
        with suppress(ConnectionError):  # it has ended: its exit code says why
            self._stdin.write(json.dumps(request).encode() + b"\n")
            await self._stdin.drain()
        while line := await self._stdout.readline():
            lines.append(json.loads(line))
            if until in lines[-1]:
                return Reply(lines)
        return Reply(lines, exit_code=await self._child.wait())

    async def end(self) -> None:
        """Kill the process with all that it started."""
        await self._child.end()
        self._child.close()


class WorkerPool:
    """Pool of at most `count` processes of one command, for one event loop."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._room = asyncio.Semaphore(count)
        self._idle: list[RewardWorker] = []
        self._busy: set[RewardWorker] = set()

    async def ask(self, request: dict[str, Any], until: str, seconds: float) -> Reply:
        """Return the lines up to one with the field `until`, or up to the end of the process."""
        async with self._room:
            worker = self._idle.pop() if self._idle else await RewardWorker.start(self._command)
            self._busy.add(worker)
            lines: list[dict[str, Any]] = []
            try:
                async with asyncio.timeout(seconds):
                    reply = await worker.ask(request, until, lines)
                if reply.exit_code is None:
                    self._idle.append(worker)
                return reply
            except TimeoutError:
                return Reply(lines, late=True)
            finally:
                self._busy.discard(worker)
                if worker not in self._idle:
                    await worker.end()

    async def close(self) -> None:
        """Kill all processes."""
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            await worker.end()
