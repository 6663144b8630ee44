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
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """Lines of a process in reply to a request, and its exit status if it ended."""

    lines: list[dict[str, Any]]
    exit_code: int | None = None  # negative: the signal number
    late: bool = False


class WorkerPool:
    """Pool of at most `count` processes of one command, for one event loop."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._room = asyncio.Semaphore(count)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()

    async def ask(self, request: dict[str, Any], until: str, seconds: float) -> Reply:
        """Return the lines up to one with the field `until`, or up to the end of the process."""
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            self._busy.add(process)
            lines: list[dict[str, Any]] = []
            try:
                async with asyncio.timeout(seconds):
                    await self._talk(process, request, until, lines)
                    if lines and until in lines[-1]:
                        self._idle.append(process)
                        return Reply(lines)
                    return Reply(lines, exit_code=await process.wait())
            except TimeoutError:
                return Reply(lines, late=True)
            finally:
                self._busy.discard(process)
                if process not in self._idle:
                    await _end(process)

    async def close(self) -> None:
        """Kill all processes."""
        processes = [*self._idle, *self._busy]
        self._idle.clear()
        for process in processes:
            await _end(process)

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)

    async def _talk(self, process: Process, request: dict[str, Any], until: str, lines: list[dict[str, Any]]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # it has ended: its exit code says why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
        while line := await process.stdout.readline():
            lines.append(json.loads(line))
            if until in lines[-1]:
                return


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
