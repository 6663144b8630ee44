"""The owner's side of a sandbox: the worker's process, and the requests that are sent to the worker one at a time.

waits for     the worker's answer, ANSWER_SECONDS longer than a call may take; the worker's end, CLOSE_SECONDS
unblocked by  the worker, which ends every call at its limit, and ends when its socket is closed; or its death
on a hang     raises EpisodeFailed("sandbox"), and the sandbox is killed
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.children.processes import ChildProcess
from asyncrl.extensions.sandbox.protocol import NOTHING, Limits, Outcome
from asyncrl.extensions.sandbox.worker import LENGTHS, Header, frame, parts

OPEN_SECONDS = 30.0
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 10.0
_MIB = 1024 * 1024


class WorkerProcess:
    """Process of a worker.

    With isolation it is the process of bubblewrap, which ends when no process is left in the sandbox. Without
    isolation it is the worker itself.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], descriptors: Collection[int], user: int | None
    ) -> None:
        """Start the process, as another user if one is given. Raises OSError.

        This blocks the event loop for some milliseconds. Bubblewrap dies with the thread that starts it
        (--die-with-parent), so the thread of the event loop has to start it.
        """
        said = os.memfd_create("stderr")
        try:
            self._child = ChildProcess(
                words,
                env=environment,  # contains nothing of the run's environment
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                pass_fds=descriptors,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except OSError:
            os.close(said)
            raise
        self._stderr = ""
        self._child.exit.add_done_callback(lambda _: self._ended(said))

    def kill(self) -> None:
        """Kill the process and its group with SIGKILL."""
        self._child.kill()

    async def ended(self) -> str:
        """Wait until the process has ended, and return what it wrote to stderr."""
        await self._child.wait()
        return self._stderr

    def _ended(self, said: int) -> None:
        self._stderr = os.pread(said, 4096, 0).decode(errors="replace").strip()
        os.close(said)


class LocalSandbox:
    """Sandbox of a worker on this machine; see protocol.Sandbox."""

    def __init__(
        self,
        worker: WorkerProcess,
        connection: socket.socket,
        limits: Limits,
        remove: Callable[[], Awaitable[None]],
        beside: LocalSandbox | None = None,
    ) -> None:
        """Wrap a worker that was just started and has the other end of the connection; see `ready`.

        remove  called when all processes have ended; removes what the sandbox left on the machine
        beside  the sandbox in which its programs may start other programs
        """
        self._worker, self._connection, self._limits = worker, connection, limits
        self._remove_rest, self._beside = remove, beside
        self._turn = asyncio.Lock()
        self._failed = ""
        self._removal: asyncio.Future[None] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ready(self) -> LocalSandbox:
        """Wait until the sandbox is ready, and return it.

        On failure or cancellation it is killed. Raises EpisodeFailed.
        """
        is_ready = False
        try:
            async with within(OPEN_SECONDS, "the sandbox did not start"):
                self._streams = await asyncio.open_unix_connection(sock=self._connection)
                answer, _ = await self._receive()
                assert "ready" in answer
                if self._beside:
                    await self._beside.ready()
            is_ready = True
            return self
        finally:
            if not is_ready:
                self.kill("the sandbox did not start")

    @property
    def usable(self) -> bool:
        """Return whether the sandbox has started and has not failed."""
        return not self._failed and self._streams is not None and not self._streams[0].at_eof()

    @property
    def removed(self) -> bool:
        """Return whether nothing of the sandbox is left on the machine."""
        return self._removal is not None and self._removal.done()

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
    ) -> Outcome:
        """See protocol.Sandbox."""
        words = list(command)
        limit = self._limits.seconds if seconds is None else min(seconds, self._limits.seconds)
        if isinstance(command, str) or not words or not words[0]:
            raise ValueError(f"{command!r} is not a command; pass a non-empty sequence of words")
        if limit <= 0:
            raise ValueError(f"the time limit of a call must be above 0 s, but is {seconds} s")
        if any("\0" in text for text in (*words, *env, *env.values())) or any("=" in name or not name for name in env):
            raise ValueError("a word or variable has a NUL byte, or the name of a variable is empty or has an '='")
        self._fits(stdin)
        request = {"do": "run", "command": words, "env": dict(env), "seconds": limit}
        answer, data = await self._ask(request, stdin, limit)
        split = answer["split"]
        return Outcome(answer["reason"], answer["exit_code"], data[:split], data[split:], answer["seconds"])

    async def write(self, path: str, data: bytes) -> None:
        """See protocol.Sandbox."""
        parts(path)
        self._fits(data)
        await self._ask({"do": "write", "path": path}, data)

    async def read(self, path: str) -> bytes:
        """See protocol.Sandbox."""
        parts(path)
        _, data = await self._ask({"do": "read", "path": path, "most": self._limits.file_mb * _MIB})
        return data

    async def close(self) -> None:
        """Close the sandbox and wait until nothing of it is left. Raises EpisodeFailed if its worker does not end."""
        self.kill("the sandbox was closed")
        assert self._removal
        await asyncio.shield(self._removal)

    def kill(self, why: str) -> None:
        """Begin to end the sandbox. `why` becomes the error of later requests."""
        self._failed = self._failed or why
        if self._streams:
            self._streams[1].close()
        else:
            self._connection.close()
        if self._removal is None:
            self._removal = asyncio.ensure_future(self._remove())
            self._removal.add_done_callback(_retrieve)

    async def _remove(self) -> None:
        """Wait until the worker has ended, because its socket is closed, or kill it. Then remove what it left."""
        if self._beside:
            self._beside.kill(self._failed)
        try:
            await asyncio.wait_for(self._worker.ended(), CLOSE_SECONDS / 2)
        except TimeoutError:
            self._worker.kill()
        async with within(CLOSE_SECONDS, "the worker did not end after SIGKILL"):
            await self._worker.ended()
        if self._beside:
            await self._beside.close()
        await self._remove_rest()
        if self._streams:
            with suppress(OSError):  # the connection may have failed
                await self._streams[1].wait_closed()

    def _fits(self, data: bytes) -> None:
        if len(data) > self._limits.file_mb * _MIB:
            raise ValueError(f"{len(data)} bytes exceed the limit of {self._limits.file_mb} MiB (file_mb)")

    async def _ask(self, header: Header, body: bytes = b"", seconds: float = 0.0) -> tuple[Header, bytes]:
        """Send one request and return its answer.

        On cancellation the program is killed, and its answer is discarded.
        """
        await self._turn.acquire()
        exchange = asyncio.ensure_future(self._exchange(header, body, seconds))
        exchange.add_done_callback(self._answered)
        try:
            answer, data = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if not exchange.done() and not self._failed and self._streams:
                self._streams[1].write(frame({"do": "stop"}))
            raise
        if "fault" in answer:
            self.kill(answer["fault"])
            raise EpisodeFailed("sandbox", answer["fault"])
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        return answer, data

    def _answered(self, exchange: asyncio.Future[Any]) -> None:
        self._turn.release()
        _retrieve(exchange)  # the task that asked may have been cancelled

    async def _exchange(self, header: Header, body: bytes, seconds: float) -> tuple[Header, bytes]:
        if self._failed:
            raise EpisodeFailed("sandbox", self._failed)
        answered = False
        try:
            async with within(seconds + ANSWER_SECONDS, "the worker did not answer"):
                answer = await self._receive(frame(header, body))
            answered = True
            return answer
        finally:
            if not answered:
                self.kill("a request to the worker failed or was interrupted")

    async def _receive(self, request: bytes = b"") -> tuple[Header, bytes]:
        """Send a message and return the next one. Raises EpisodeFailed if the worker has ended."""
        assert self._streams
        reader, writer = self._streams
        try:
            writer.write(request)
            await writer.drain()
            head, size = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
            data = await reader.readexactly(head + size)
        except (asyncio.IncompleteReadError, OSError):
            if not self._failed:
                async with within(CLOSE_SECONDS, "the worker closed its socket but did not end"):
                    said = await self._worker.ended()
            raise EpisodeFailed("sandbox", self._failed or said or "the worker died without a message") from None
        return json.loads(data[:head]), data[head:]


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log it if nobody awaits the future."""
    if not future.cancelled():
        future.exception()


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Limit the duration of a block like asyncio.timeout, but raise EpisodeFailed."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise EpisodeFailed("sandbox", f"{what} within {seconds:.0f} s") from None
