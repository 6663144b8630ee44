"""A sandbox of this machine, as its owner holds it: requests go to its supervisor, one at a time.

waits for     the supervisor's answer, ANSWER_SECONDS longer than a call may take
unblocked by  the supervisor, which ends every call at its limit; or its death
on a hang     EpisodeFailed("sandbox"), and the sandbox is killed
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.envs.sandbox.folder import parts
from asyncrl.envs.sandbox.protocol import NOTHING, Limits, Outcome
from asyncrl.envs.sandbox.spawning import Spawning, within
from asyncrl.envs.sandbox.wire import LENGTHS, Header, frame
from asyncrl.errors import EpisodeFailed

OPEN_SECONDS = 30.0
ANSWER_SECONDS = 30.0
_MIB = 1024 * 1024


class LocalSandbox:
    """See protocol.Sandbox."""

    def __init__(
        self,
        spawning: Spawning,
        number: int,
        limits: Limits,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._spawning, self._number, self._limits = spawning, number, limits
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._failed = ""

    @classmethod
    async def open(cls, spawning: Spawning, number: int, limits: Limits) -> LocalSandbox:
        """Raises EpisodeFailed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                spawning.open(number, theirs)
            except EpisodeFailed:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        sandbox, ready = cls(spawning, number, limits, reader, writer), False
        try:
            async with within(OPEN_SECONDS, "the sandbox has not come up"):
                answer, _ = await sandbox._receive()
            if "fault" in answer:
                raise EpisodeFailed("sandbox", answer["fault"])
            ready = True
            return sandbox
        finally:
            if not ready:
                sandbox.kill("it has not come up")

    @property
    def usable(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self._spawning.alive and not self._failed and not self._reader.at_eof()

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
        await self._spawning.gone(self._number)
        with suppress(OSError):  # whatever became of the connection
            await self._writer.wait_closed()

    def kill(self, why: str) -> None:
        """Begin to end it."""
        self._failed = self._failed or why
        self._spawning.kill(self._number)
        self._writer.close()

    def _fits(self, data: bytes) -> None:
        if len(data) > self._limits.file_mb * _MIB:
            raise ValueError(f"{len(data)} bytes are more than {self._limits.file_mb} MiB (file_mb)")

    async def _ask(self, header: Header, body: bytes = b"", seconds: float = 0.0) -> tuple[Header, bytes]:
        """One request and its answer. When its task is cancelled the program is killed, and its answer still comes."""
        await self._turn.acquire()
        exchange = asyncio.ensure_future(self._exchange(header, body, seconds))
        exchange.add_done_callback(self._answered)
        try:
            answer, data = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if not exchange.done() and not self._failed:
                self._writer.write(frame({"do": "stop"}))
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
        if not exchange.cancelled():
            exchange.exception()  # whoever asked may be gone

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
        """The next message, after this one was sent. Raises EpisodeFailed when the supervisor has gone."""
        try:
            self._writer.write(request)
            await self._writer.drain()
            head, size = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
            data = await self._reader.readexactly(head + size)
        except (asyncio.IncompleteReadError, OSError):
            why = self._failed or await self._spawning.gone(self._number)
            raise EpisodeFailed("sandbox", why or "its supervisor has died") from None
        return json.loads(data[:head]), data[head:]
