"""MCP server as a child process, with the streams that the client of the `mcp` package reads and writes.

The package's own transport (mcp.client.stdio, 2.3) collects lines of any length, in quadratic time, passes
stderr on to ours, and can leave the process behind when it is cancelled twice. Here a line is at most MOST_BYTES
long, the last lines that are not messages are kept for diagnosis, and the process group is always killed.

waits for     lines of its stdout; at the end GRACE_SECONDS for it to exit by itself
unblocked by  the end of its stdout, which is the end of the connection
on a hang     the caller's time limits; closing kills its process group
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.children.processes import ChildProcess, describe

MOST_BYTES = 4 << 20
"""Maximum size of a message in bytes."""
TOO_LARGE = f"the answer is larger than {MOST_BYTES >> 20} MiB"
GRACE_SECONDS = 1.0
_TAIL = 2000
"""Number of characters of a server's output that are kept."""
_ID = re.compile(rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*[,}]')


class ServerOutput:
    """The end of what a server wrote to stderr, and of the lines on stdout that are not messages."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = ""

    def add(self, data: bytes) -> None:
        """Append output."""
        self.text = (self.text + data[-_TAIL:].decode(errors="replace"))[-_TAIL:]

    def __str__(self) -> str:
        said = f"; its last output:\n{self.text.strip()}" if self.text.strip() else ""
        return f"{self.ended}{said}"


@asynccontextmanager
async def stdio(
    command: Sequence[str], env: Mapping[str, str], folder: str | None, said: ServerOutput, lost: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the two streams of an MCP session with the server that a command starts; `lost` is called when it hangs up.
    Raises EpisodeFailed if there is no such program."""
    try:
        child = ChildProcess(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=dict(env), cwd=folder)
    except (OSError, ValueError) as error:
        raise EpisodeFailed("tool", f"{' '.join(command)} cannot be started: {error}", retry=False) from None
    async with child.ended_on_error():
        stdin, stdout, stderr = await child.writer(), await child.reader("stdout"), await child.reader("stderr")
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is over
            async with incoming:
                async for line in _lines(stdout):
                    if message := _message(line, said):
                        await incoming.send(message)
        lost()

    async def write() -> None:
        with suppress(OSError):  # the server has closed its stdin
            async with outgoing:
                async for sent in outgoing:
                    data = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(data.encode() + b"\n")
                    await stdin.drain()
        lost()

    async def listen() -> None:
        while data := await stderr.read(1 << 16):
            said.add(data)

    async with anyio.create_task_group() as group:
        for work in (read, write, listen):
            group.start_soon(work)
        try:
            yield read_stream, write_stream
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    for stream in (read_stream, write_stream):
                        stream.close()
                    stdin.close()
                    await child.wait(GRACE_SECONDS)
            finally:
                with anyio.CancelScope(shield=True):
                    said.ended = f"it {describe(await child.end())}"
                child.close()
                group.cancel_scope.cancel()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines. Of a line that is too long, yield its first MOST_BYTES + 1 bytes."""
    line = bytearray()
    while data := await stream.read(1 << 16):
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield bytes(line[: MOST_BYTES + 1] + end)
            line.clear()
        if len(line) <= MOST_BYTES:
            line += rest


def _message(line: bytes, said: ServerOutput) -> SessionMessage | None:
    """Parse a message. Returns None for other lines, such as those that a server prints by mistake."""
    if len(line) <= MOST_BYTES:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            said.add(line + b"\n")
            return None
    if found := _ID.match(line[:200]):
        error = ErrorData(code=INTERNAL_ERROR, message=TOO_LARGE)
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error))
    said.add(f"[a message of more than {MOST_BYTES} bytes]\n".encode())
    return None
