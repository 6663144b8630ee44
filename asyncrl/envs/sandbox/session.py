"""A sandbox as its owner holds it: the worker's process, and requests that go to the worker one at a time.

waits for     the worker's answer, ANSWER_SECONDS longer than a call may take; its end, CLOSE_SECONDS
unblocked by  the worker, which ends every call at its limit, and ends when its socket is closed; or its death
on a hang     EpisodeFailed("sandbox"), and the sandbox is killed
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

from asyncrl.envs.sandbox.protocol import NOTHING, Limits, Outcome
from asyncrl.envs.sandbox.worker import LENGTHS, Header, frame, parts
from asyncrl.errors import EpisodeFailed

OPEN_SECONDS = 30.0
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 10.0
_MIB = 1024 * 1024


class WorkerProcess:
    """The process of a worker: that of bubblewrap, which ends when nothing in the sandbox runs any more, or without
    isolation the worker itself."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], descriptors: Collection[int], user: int | None
    ) -> None:
        """Start it, as another user if one is given. That holds the event loop for some milliseconds. Raises OSError.

        Bubblewrap dies with the thread that starts it (--die-with-parent), so this has to be the event loop's.
        """
        self._said = os.memfd_create("stderr")
        try:
            self._process = subprocess.Popen(
                words,
                env=environment,  # nothing of ours can be found in it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=descriptors,
                start_new_session=True,  # what is sent to our process group is not for it
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except OSError:
            os.close(self._said)
            raise
        self._alive = os.pidfd_open(self._process.pid)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(self._alive, self._ended)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    async def ended(self) -> str:
        """Wait until it has ended, and return what it said on stderr."""
        return await asyncio.shield(self._end)

    def _ended(self) -> None:
        self._loop.remove_reader(self._alive)
        self._process.wait()
        self._end.set_result(os.pread(self._said, 4096, 0).decode(errors="replace").strip())
        os.close(self._alive)
        os.close(self._said)


class LocalSandbox:
    """See protocol.Sandbox."""

    def __init__(
        self,
        worker: WorkerProcess,
        connection: socket.socket,
        limits: Limits,
        remove: Callable[[], Awaitable[None]],
        beside: LocalSandbox | None = None,
    ) -> None:
        """Take a worker that has just been started, at the other end of the connection; see `ready`.

        remove  is called when its processes have ended, and removes what is left of it on the machine
        beside  the sandbox in which its programs may have others started
        """
        self._worker, self._connection, self._limits = worker, connection, limits
        self._remove_rest, self._beside = remove, beside
        self._turn = asyncio.Lock()
        self._failed = ""
        self._removal: asyncio.Future[None] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ready(self) -> LocalSandbox:
        """Wait until it is, and return it. Raises EpisodeFailed; then, and when cancelled, it is killed."""
        is_ready = False
        try:
            async with within(OPEN_SECONDS, "the sandbox has not come up"):
                self._streams = await asyncio.open_unix_connection(sock=self._connection)
                answer, _ = await self._receive()
                assert "ready" in answer
                if self._beside:
                    await self._beside.ready()
            is_ready = True
            return self
        finally:
            if not is_ready:
                self.kill("it has not come up")

    @property
    def usable(self) -> bool:
        """Return whether nothing is known to be wrong with it."""
        return not self._failed and self._streams is not None and not self._streams[0].at_eof()

    @property
    def removed(self) -> bool:
        """Return whether nothing is left of it."""
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
            raise ValueError(f"{command!r} is no command: a sequence of words is")
        if limit <= 0:
            raise ValueError(f"a call of {seconds} seconds")
        if any("\0" in text for text in (*words, *env, *env.values())) or any("=" in name or not name for name in env):
            raise ValueError("a word or a variable that no program can be given")
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
        """See protocol.Sandbox. Returns when nothing is left; raises EpisodeFailed when something seems to be."""
        self.kill("it was closed")
        assert self._removal
        await asyncio.shield(self._removal)

    def kill(self, why: str) -> None:
        """Begin to end it."""
        self._failed = self._failed or why
        if self._streams:
            self._streams[1].close()
        else:
            self._connection.close()
        if self._removal is None:
            self._removal = asyncio.ensure_future(self._remove())
            self._removal.add_done_callback(_retrieve)

    async def _remove(self) -> None:
        """Wait for the end of the worker, which sees that its socket is closed; if need be, kill it."""
        if self._beside:
            self._beside.kill(self._failed)
        try:
            await asyncio.wait_for(self._worker.ended(), CLOSE_SECONDS / 2)
        except TimeoutError:
            self._worker.kill()
        async with within(CLOSE_SECONDS, "the sandbox does not end"):
            await self._worker.ended()
        if self._beside:
            await self._beside.close()
        await self._remove_rest()
        if self._streams:
            with suppress(OSError):  # whatever became of the connection
                await self._streams[1].wait_closed()

    def _fits(self, data: bytes) -> None:
        if len(data) > self._limits.file_mb * _MIB:
            raise ValueError(f"{len(data)} bytes are more than {self._limits.file_mb} MiB (file_mb)")

    async def _ask(self, header: Header, body: bytes = b"", seconds: float = 0.0) -> tuple[Header, bytes]:
        """Make one request. When its task is cancelled the program is killed, and its answer still comes."""
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
        _retrieve(exchange)  # whoever asked may be gone

    async def _exchange(self, header: Header, body: bytes, seconds: float) -> tuple[Header, bytes]:
        if self._failed:
            raise EpisodeFailed("sandbox", self._failed)
        answered = False
        try:
            async with within(seconds + ANSWER_SECONDS, "the sandbox has not answered"):
                answer = await self._receive(frame(header, body))
            answered = True
            return answer
        finally:
            if not answered:
                self.kill("it broke off an exchange")

    async def _receive(self, request: bytes = b"") -> tuple[Header, bytes]:
        """Send a message and return the next one. Raises EpisodeFailed when the worker has gone."""
        assert self._streams
        reader, writer = self._streams
        try:
            writer.write(request)
            await writer.drain()
            head, size = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
            data = await reader.readexactly(head + size)
        except (asyncio.IncompleteReadError, OSError):
            if not self._failed:
                async with within(CLOSE_SECONDS, "the sandbox has hung up and does not end"):
                    said = await self._worker.ended()
            raise EpisodeFailed("sandbox", self._failed or said or "its worker has died") from None
        return json.loads(data[:head]), data[head:]


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take note of an exception that nobody may be there to see."""
    if not future.cancelled():
        future.exception()


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound a block like asyncio.timeout. Raises EpisodeFailed."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise EpisodeFailed("sandbox", f"{what} for {seconds:.0f} s") from None
