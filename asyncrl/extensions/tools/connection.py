"""One session with an MCP server, over the pipes of its process or over HTTP.

The client's scopes must be exited by the task that entered them. Therefore a separate task holds the session, and
callers of tools send it requests.

waits for     the server: start_timeout to start, PROBE_SECONDS to list its tools after a call was given up
unblocked by  its answer, its end, or the end of its connection: all waiting calls are notified
on a hang     a call is given up by its caller; a server that does not answer the probe either is ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pydantic
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CallToolResult, ImageContent, TextContent, Tool

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.tools.stdio import MOST_BYTES, TOO_LARGE, ServerOutput
from asyncrl.extensions.tools.tool import ToolError, ToolOutput
from asyncrl.schema import Message

PROBE_SECONDS = 30.0
END_SECONDS = 5.0
MOST_PAGES = 100
_SSE_TOO_LARGE = f"exceeded the {MOST_BYTES} byte limit"
"""Error that httpx2 raises for an event of that size."""

Open = Callable[[ServerOutput, Callable[[], None]], AbstractAsyncContextManager[Any]]
"""Opens the transport. It records what the server prints, and calls the callback when the server has hung up."""


class Connection:
    """Connection to one server, until it ends."""

    def __init__(self, name: str, open: Open) -> None:
        self._name, self._open = name, open
        self._said = ServerOutput()
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self.why = "it closed the connection"
        """Reason for its end."""

    @property
    def alive(self) -> bool:
        """Return whether it can still be used."""
        return self._owner is not None and not self._owner.done() and not self._stop.is_set()

    async def start(self, seconds: float) -> None:
        """Start the session. Raises EpisodeFailed if the server does not start within so many seconds."""
        self._owner = asyncio.get_running_loop().create_task(self._own())
        self._owner.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.end(f"it did not start within {seconds:g} s")
            raise self._failed() from None
        except asyncio.CancelledError:
            await self.end("its start was cancelled")
            raise

    async def tools(self) -> list[Tool]:
        """Return all tools that the server lists. Raises EpisodeFailed."""
        found, cursor = list[Tool](), None
        for _ in range(MOST_PAGES):
            page = await self._ask(lambda client: client.list_tools(cursor=cursor))  # noqa: B023  called at once
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolOutput:
        """Return the text and images of the answer. Raises ToolError for what the tool reports, and EpisodeFailed."""
        try:
            result: CallToolResult = await self._ask(lambda client: client.call_tool(tool, arguments))
        except asyncio.CancelledError:
            self._probe()
            raise
        parts = told(result)
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise ToolError(text)
        return parts if any(part["type"] == "image" for part in parts) else text

    async def end(self, why: str) -> None:
        """Close it, and wait until its process has ended."""
        if self.alive:
            self.why = why
        self._stop.set()
        if self._probing:
            self._probing.cancel()
        if self._owner:
            if not self._ready.done():
                self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=END_SECONDS)

    async def _own(self) -> None:
        async with Client(self._open(self._said, self._stop.set), cache=None) as self._client:
            self._ready.set_result(None)
            await self._stop.wait()

    def _ended(self, owner: asyncio.Task[None]) -> None:
        leaves = [] if owner.cancelled() else _leaves(owner.exception())
        if leaves:
            self.why = "; ".join(f"{type(one).__name__}: {one}" for one in leaves)
        self._stop.set()
        if not self._ready.done():
            own = [one for one in leaves if isinstance(one, EpisodeFailed)]  # the program could not be started
            self._ready.set_exception(own[0] if own else self._failed())
            self._ready.exception()  # mark as retrieved: the waiter may have been cancelled

    async def _ask(self, ask: Callable[[Client], Any]) -> Any:
        if not self.alive or self._client is None:
            raise self._failed()
        try:
            return await ask(self._client)
        except MCPError as error:
            if any(text in error.message for text in (TOO_LARGE, _SSE_TOO_LARGE)):
                raise ToolError(TOO_LARGE) from None
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            if self._stop.is_set() and self._owner:
                await asyncio.wait({self._owner}, timeout=END_SECONDS)  # it collects how the process ended
                raise self._failed() from None
            self._probe()
            raise EpisodeFailed("tool", f"the MCP server {self._name} failed: {error.message}") from None
        except (pydantic.ValidationError, RuntimeError) as error:
            raise EpisodeFailed("tool", f"the MCP server {self._name} sent an invalid answer: {error}") from None

    def _failed(self) -> EpisodeFailed:
        said = str(self._said)
        why = f"{self.why}{', ' if said and not said.startswith(';') else ''}{said}"
        return EpisodeFailed("tool", f"the MCP server {self._name} is gone: {why}")

    def _probe(self) -> None:
        """Probe in the background, after a call was given up, whether the server still answers."""
        if self.alive and (self._probing is None or self._probing.done()):
            self._probing = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        assert self._client
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._client.list_tools()
        except (TimeoutError, MCPError, pydantic.ValidationError, RuntimeError) as error:
            if self.alive:
                self.why = f"it no longer answers ({type(error).__name__}: {error})"
            self._stop.set()


def told(result: CallToolResult) -> list[Message]:
    """Return the parts of a result; those that are neither text nor images are named."""
    parts: list[Message] = []
    for item in result.content:
        if isinstance(item, ImageContent):
            parts.append({"type": "image", "image": f"data:{item.mime_type};base64,{item.data}"})
            continue
        text = item.text if isinstance(item, TextContent) else getattr(getattr(item, "resource", None), "text", None)
        parts.append({"type": "text", "text": f"[{item.type}, which cannot be shown]" if text is None else text})
    if not parts and result.structured_content is not None:
        text = pydantic.TypeAdapter(Any).dump_json(result.structured_content).decode()
        parts.append({"type": "text", "text": text})
    return parts


def _leaves(error: BaseException | None) -> list[BaseException]:
    if error is None:
        return []
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]
