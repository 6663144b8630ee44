"""Child processes of an event loop, each in a session and process group of its own, and their messages.

A message is four bytes of length, little-endian, and msgpack.

waits for     the exit of a process, through a pidfd: neither a thread nor the event loop blocks
on a hang     waits as long as the caller says; `end` kills the process group, and gives up after KILL_SECONDS
leaves        nothing of the process group: it is killed when its leader exits, before the leader is reaped, while its
              id cannot be reused. A process that moves to another session has the run's id in its environment, and is
              killed with the run (launch/leftovers.py)
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any, BinaryIO, Literal

import msgspec

KEPT_BYTES = 64 << 10
"""Number of bytes that an OutputTail keeps."""
KILL_SECONDS = 5.0
LENGTH = struct.Struct("<I")
"""Length of a message, which stands before it."""
decoded = msgspec.msgpack.decode


def framed(message: object) -> bytes:
    """Return a message as it is sent. Raises TypeError or OverflowError for what msgpack cannot hold."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def messages(stream: BinaryIO) -> Iterator[Any]:
    """Yield the messages of the other side, as a child does, up to the end of the stream."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(head)
        if len(data := stream.read(size)) < size:
            return
        yield decoded(data)


class OversizedMessage(ValueError):
    """Raised for a message that is longer than the receiver accepts."""


async def received(reader: asyncio.StreamReader, most: int = 1 << 32) -> Any:
    """Return the next message of a child. Raises asyncio.IncompleteReadError at the end of the stream,
    OversizedMessage for one of more than `most` bytes, and msgspec.DecodeError for what is no msgpack."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > most:
        raise OversizedMessage(f"its answer has {size} bytes, more than the limit of {most}")
    return decoded(await reader.readexactly(size))


class OutputTail(asyncio.Protocol):
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Append output, and forget what is no longer among the last bytes."""
        self.data += data
        del self.data[:-KEPT_BYTES]

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the stream."""
        if not self.ended.done():
            self.ended.set_result(None)

    def last_lines(self, lines: int, characters: int) -> str:
        """Return the last lines, at most so many, and of their text at most the last `characters`."""
        return "\n".join(self.data.decode(errors="replace").strip().splitlines()[-lines:])[-characters:]


class ChildProcess:
    """A program that was started by this process."""

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        """Start the program. `options` are those of subprocess.Popen. Raises OSError or ValueError."""
        self._process = subprocess.Popen(argv, start_new_session=True, **options)
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[int] = self._loop.create_future()
        """Exit status as subprocess gives it: negative if a signal killed the program."""
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._exited)
        self._transports: list[asyncio.BaseTransport] = []
        process = self._process
        self._pipes = {"stdin": process.stdin, "stdout": process.stdout, "stderr": process.stderr}
        """Pipes that have no transport yet."""

    async def reader(self, stream: Literal["stdout", "stderr"] = "stdout", line: int = 1 << 16) -> asyncio.StreamReader:
        """Return a reader of one of its streams, which must be a pipe; a line may have at most `line` bytes."""
        reader = asyncio.StreamReader(line)
        await self._connect(self._loop.connect_read_pipe, asyncio.StreamReaderProtocol(reader), stream)
        return reader

    async def tail(self, stream: Literal["stdout", "stderr"] = "stdout") -> OutputTail:
        """Keep the last bytes of one of its streams, which must be a pipe."""
        await self._connect(self._loop.connect_read_pipe, tail := OutputTail(), stream)
        return tail

    async def writer(self) -> asyncio.StreamWriter:
        """Return a writer to stdin, which must be a pipe."""
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())  # a StreamWriter asks it for flow control
        transport = await self._connect(self._loop.connect_write_pipe, protocol, "stdin")
        self._writer = asyncio.StreamWriter(transport, protocol, None, self._loop)  # it closes when nobody holds it
        return self._writer

    async def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the program has exited, and return its status, or None after so many seconds."""
        await asyncio.wait({self.exit}, timeout=seconds)
        return self.exit.result() if self.exit.done() else None

    def kill(self) -> None:
        """Kill the process group."""
        if not self.exit.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        """Kill the process group, and return the status of the program; None if it does not die in KILL_SECONDS."""
        self.kill()
        return await self.wait(KILL_SECONDS)

    @asynccontextmanager
    async def ended_on_error(self) -> AsyncIterator[None]:
        """End the program and close its pipes if the block raises or is cancelled."""
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if not succeeded:
                self.kill()
                self.close()
                await self.wait(KILL_SECONDS)  # anyio may cancel this, too; the process is reaped in any case

    def close(self) -> None:
        """Close our ends of the pipes, which a process that left the group may still hold."""
        for pipe in self._pipes.values():
            if pipe:
                pipe.close()
        for transport in self._transports:
            if transport.is_closing():
                continue
            transport.abort() if isinstance(transport, asyncio.WriteTransport) else transport.close()

    async def _connect(self, connect: Any, protocol: asyncio.BaseProtocol, stream: str) -> Any:
        transport, _ = await connect(lambda: protocol, self._pipes.pop(stream))
        self._transports.append(transport)
        return transport

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with suppress(PermissionError):  # what remains runs as another user, and cannot be killed
            self.kill()  # the rest of the group: until the leader is reaped, its id is not reused
        status = self._process.wait()
        if not self.exit.done():
            self.exit.set_result(status)


def describe(status: int | None) -> str:
    """Return how a program ended, in words."""
    if status is None:
        return f"did not die within {KILL_SECONDS:.0f} s of SIGKILL"
    return f"exited with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


@dataclass(frozen=True)
class Reply:
    """Messages of a process in reply to a request, and its exit status if it ended."""

    messages: list[dict[str, Any]]
    exit_code: int | None = None  # negative: the signal number
    late: bool = False


class PoolWorker:
    """Process of a pool."""

    def __init__(self, child: ChildProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._child, self._stdin, self._stdout = child, stdin, stdout

    @classmethod
    async def start(cls, command: Sequence[str]) -> PoolWorker:
        """Start a process."""
        child = ChildProcess(command, stdin=PIPE, stdout=PIPE)
        async with child.ended_on_error():
            return cls(child, await child.writer(), await child.reader())

    async def ask(self, request: dict[str, Any], until: str, reply: list[dict[str, Any]]) -> Reply:
        """Append the messages of the reply as they come. Returns the reply, which is complete if the process lives."""
        with suppress(ConnectionError):  # it has ended: its exit code says why
            self._stdin.write(framed(request))
            await self._stdin.drain()
        with suppress(asyncio.IncompleteReadError):  # the same
            while not reply or until not in reply[-1]:
                reply.append(await received(self._stdout))
            return Reply(reply)
        return Reply(reply, exit_code=await self._child.wait())

    async def end(self) -> None:
        """Kill the process with all that it started."""
        await self._child.end()
        self._child.close()


class WorkerPool:
    """Pool of at most `count` processes of one command that answer one request at a time, for one event loop.

    They start with the first request, because most runs do not need them. A process that does not answer within
    `seconds` of wall-clock time is killed, also when the caller stops waiting; that time does not measure the work, for
    which a worker has a limit of its own. One that has ended is replaced.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._room = asyncio.Semaphore(count)
        self._idle: list[PoolWorker] = []
        self._busy: set[PoolWorker] = set()

    async def ask(self, request: dict[str, Any], until: str, seconds: float) -> Reply:
        """Return the messages up to one with the field `until`, or up to the end of the process."""
        async with self._room:
            worker = self._idle.pop() if self._idle else await PoolWorker.start(self._command)
            self._busy.add(worker)
            found: list[dict[str, Any]] = []
            try:
                async with asyncio.timeout(seconds):
                    reply = await worker.ask(request, until, found)
                if reply.exit_code is None:
                    self._idle.append(worker)
                return reply
            except TimeoutError:
                return Reply(found, late=True)
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
