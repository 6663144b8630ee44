"""MCP servers for episodes: one shared by all, or one per episode, some of them started ahead of time.

waits for     the start of a server: `start_timeout`, and `restarts` further attempts, 1, 2, 4, ... s apart
unblocked by  its start
on death      calls in flight raise EpisodeFailed, and the next call or episode starts it again
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.tools.connection import Connection
from asyncrl.extensions.tools.tool import ToolOutput
from asyncrl.retries import pause

LONGEST_DELAY = 30.0


class Starter:
    """Starter of one server, with bounded retries."""

    def __init__(
        self, name: str, connect: Callable[[], Connection], *, start_timeout: float, restarts: int, delay: float = 1.0
    ) -> None:
        """Configure the starter. `start_timeout` bounds one start in seconds. `restarts` is the number of further
        attempts after a failure. `delay` is the longest wait in seconds before the first of these; it doubles each
        time."""
        self._name, self._connect, self._seconds, self._restarts = name, connect, start_timeout, restarts
        self._delay = delay

    async def start(self) -> Connection:
        """Return a started connection. Raises EpisodeFailed."""
        for left in range(self._restarts, -1, -1):
            connection = self._connect()
            try:
                await connection.start(self._seconds)
                return connection
            except EpisodeFailed as failed:
                if not failed.retry or not left:
                    raise
            await pause(self._restarts - left, first=self._delay, longest=LONGEST_DELAY)
        raise AssertionError("the last attempt always returns or raises")


class ServerLease(Protocol):
    """The server of one episode."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolOutput: ...


class Servers(Protocol):
    """Servers of one specification."""

    def lease(self) -> ServerLease: ...

    async def close(self) -> None: ...


class Shared:
    """One server for all episodes, which must be stateless. It is its own lease."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._connection: Connection | None = None
        self._starting: asyncio.Task[Connection] | None = None

    def lease(self) -> ServerLease:
        """Return the lease that all episodes share."""
        return _Borrowed(self)

    async def ready(self) -> Connection:
        """Return the living connection, and start it if necessary. Cancelling one waiter does not cancel the start,
        because others wait for it."""
        if self._connection and self._connection.alive:
            return self._connection
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._starter.start())
            self._starting.add_done_callback(self._started)
        starting = self._starting
        await asyncio.wait({starting})
        if starting.cancelled():
            raise EpisodeFailed("tool", "the MCP server was closed")
        return starting.result()

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call a tool; see Connection.call."""
        connection = await self.ready()
        return await connection.call(tool, arguments)

    async def close(self) -> None:
        """Stop the server."""
        if self._starting:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._connection:
            await self._connection.end("it was closed")

    def _started(self, starting: asyncio.Task[Connection]) -> None:
        self._starting = None
        if not starting.cancelled() and starting.exception() is None:
            self._connection = starting.result()


class _Borrowed:
    """Lease of a shared server; closing it stops nothing."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.call = shared.call

    async def open(self) -> None:
        """Wait until the server has started."""
        await self._shared.ready()

    async def close(self) -> None:
        """No-op, because others use the server."""


class PerEpisode:
    """A server for each episode, `warm` of them started ahead."""

    def __init__(self, starter: Starter, warm: int) -> None:
        self._starter, self._warm = starter, warm
        self._ready: deque[Connection] = deque()
        self._filling: set[asyncio.Task[None]] = set()
        self._leases: set[_Own] = set()
        self._closed = False

    def lease(self) -> ServerLease:
        """Return a lease that takes a server when it is opened."""
        return _Own(self)

    async def take(self, lease: _Own) -> Connection:
        """Return a server that no other episode has used. Raises EpisodeFailed."""
        connection = None
        while self._ready and connection is None:
            first = self._ready.popleft()
            connection = first if first.alive else None
        try:
            connection = connection or await self._starter.start()
            self._leases.add(lease)
            return connection
        finally:
            self._refill()

    def given_back(self, lease: _Own) -> None:
        """Record that the lease has stopped its server."""
        self._leases.discard(lease)

    async def close(self) -> None:
        """Stop all servers."""
        self._closed = True
        for task in self._filling:
            task.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        await asyncio.gather(*(lease.close() for lease in list(self._leases)))
        await asyncio.gather(*(connection.end("it was closed") for connection in self._ready))

    def _refill(self) -> None:
        while len(self._ready) + len(self._filling) < self._warm and not self._closed:
            task = asyncio.get_running_loop().create_task(self._fill())
            self._filling.add(task)
            task.add_done_callback(self._filled)

    async def _fill(self) -> None:
        self._ready.append(await self._starter.start())

    def _filled(self, task: asyncio.Task[None]) -> None:
        self._filling.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the next episode starts a server itself and gets the error


class _Own:
    """Server of one episode. When it dies the episode is lost, together with the server's state."""

    def __init__(self, servers: PerEpisode) -> None:
        self._servers = servers
        self._connection: Connection | None = None

    async def open(self) -> None:
        """Take a server."""
        if self._connection is None:
            self._connection = await self._servers.take(self)

    async def close(self) -> None:
        """Stop the server."""
        connection, self._connection = self._connection, None
        if connection:
            self._servers.given_back(self)
            await connection.end("its episode is over")

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call a tool; see Connection.call."""
        if self._connection is None:
            raise EpisodeFailed("tool", "the episode's MCP server is not open")
        return await self._connection.call(tool, arguments)
