"""Execution of users' programs that does not block the event loop and keeps a bounded part of their output.

waits for     the program's exit
on a hang     waits without a deadline; cancelling `run` kills the process group
leaves        nothing of the process group, however the program ends: the group is killed before its leader is reaped,
              while its id cannot be reused. A process that the program moves to another session has the run's id in
              its environment, and is killed with the run (launch/leftovers.py)
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import EpisodeFailed

KEPT_BYTES = 64 << 10
"""Number of bytes kept from the end of each stream."""
LAST_LINES, LAST_CHARACTERS = 10, 2000
KILL_SECONDS = 5.0
FLUSH_SECONDS = 2.0
"""Deadline for the rest of the output after the group was killed. A process outside the group may hold a pipe open
forever."""


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program that has ended."""

    status: int  # as in subprocess: negative if a signal killed it
    stdout: bytes  # its last bytes
    stderr: bytes

    @property
    def reason(self) -> str:
        """Description of the exit status."""
        return f"exited with status {self.status}" if self.status >= 0 else f"was killed by signal {-self.status}"

    def last_lines(self) -> str:
        """Return the last lines of stderr."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        return "\n".join(lines)[-LAST_CHARACTERS:] or "(it wrote nothing to stderr)"


class _Tail(asyncio.Protocol):
    """Protocol that keeps the last bytes of a stream."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data += data
        del self.data[:-KEPT_BYTES]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run(argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: Path | None = None) -> ProgramResult:
    """Run a program to its end. Raises OSError when it does not start, and EpisodeFailed when it survives SIGKILL."""
    loop, tails = asyncio.get_running_loop(), list[_Tail]()
    with ExitStack() as held:
        process = _start(argv, stdin, env, cwd)
        exited = _exit_of(process.pid, held)
        try:
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                held.enter_context(stream)
                transport, tail = await loop.connect_read_pipe(_Tail, stream)
                held.callback(transport.close)
                tails.append(tail)
            await asyncio.wait({exited})
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait({exited}, timeout=KILL_SECONDS)
            status = process.poll()
        if status is None:
            raise EpisodeFailed("agent_error", f"{argv[0]} did not die within {KILL_SECONDS:.0f} s of SIGKILL")
        await asyncio.wait([tail.ended for tail in tails], timeout=FLUSH_SECONDS)
        stdout, stderr = (bytes(tail.data) for tail in tails)
        return ProgramResult(status, stdout, stderr)


def _start(argv: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
    """Start the program. Its stdin is a file in memory, so a program that does not read all of it cannot block us."""
    with open(os.memfd_create("stdin"), "w+b") as given:
        given.write(stdin)
        given.seek(0)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv, stdin=given, stdout=pipe, stderr=pipe, env=dict(env), cwd=cwd, start_new_session=True
        )


def _exit_of(pid: int, held: ExitStack) -> asyncio.Future[None]:
    """Return a future that is done when the child has exited. It does not reap the child."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(pid)

    def tell() -> None:
        loop.remove_reader(descriptor)
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(descriptor, tell)
    held.callback(os.close, descriptor)
    held.callback(loop.remove_reader, descriptor)
    return exited
