"""Tools that MCP servers offer, over stdio (a command) or streamable HTTP (a URL), with the `mcp` package.

{"use": "mcp", "command": ["python", "-m", "asyncrl.extensions.tools.calculator"]}
{"use": "mcp", "url": "http://127.0.0.1:8000/mcp", "headers": {"Authorization": "$TOKEN"}, "per_episode": true}
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import mcp_types
import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from mcp.client.streamable_http import streamable_http_client

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.tools.connection import Connection
from asyncrl.extensions.tools.servers import PerEpisode, ServerLease, Servers, Shared, Starter
from asyncrl.extensions.tools.shared import shared
from asyncrl.extensions.tools.stdio import MOST_BYTES, TOO_LARGE, stdio
from asyncrl.extensions.tools.tool import OnFault, Tool, ToolOutput

INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR", "USER", "ASYNCRL_RUN_ID")
"""Environment variables that a server receives: no keys. The launcher uses the last one to find what a killed run left.
"""
HTTP_SECONDS = 300.0
T = TypeVar("T")
_listed: dict[bytes, list[mcp_types.Tool]] = {}
"""Tools that each server offers, by specification; each is asked once per process."""


class McpSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A server, and how its tools are used. A value "$NAME" in `env` and `headers` is taken from the environment."""

    use: str
    command: list[str] = []  # "python" stands for the interpreter of this process
    url: str = ""
    env: dict[str, str] = {}
    folder: str | None = None  # working directory of the command
    headers: dict[str, str] = {}
    only: list[str] = []  # names of tools; empty: all
    per_episode: bool = False  # one server per episode; otherwise all share one, which must be stateless
    warm: int = 0  # with per_episode: number of servers started ahead of time
    start_timeout: float = 30.0  # seconds
    restarts: int = 3  # further attempts if it does not start
    timeout: float | None = None  # limit of one call in seconds; None: that of the environment
    on_fault: OnFault | None = None

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has a command or a url")

    def check(self, field: str) -> None:
        """See ToolSource.check."""
        for part in ("env", "headers"):
            for name, value in getattr(self, part).items():
                if value.startswith("$") and value[1:] not in os.environ:
                    raise ConfigError(f"{field}.{part}.{name}", value, "This environment variable is not set.")

    def listed(self, field: str) -> Sequence[Tool]:
        """See ToolSource.listed."""
        key = msgspec.json.encode(self)
        if key not in _listed:
            _listed[key] = _off_the_loop(lambda: ask(self, field))
        lease = servers(self).lease()
        return [McpTool(one, lease, self) for one in _listed[key]]

    async def episode(self, field: str) -> Sequence[Tool]:
        """See ToolSource.episode."""
        return await shared("mcp", self, lambda: McpServers(self)).episode(field)

    @property
    def name(self) -> str:
        """Name of the server for messages."""
        return self.url or " ".join(self.command)


class McpTool:
    """One tool of a server, in one episode."""

    def __init__(self, listed: mcp_types.Tool, lease: ServerLease, spec: McpSpec) -> None:
        self.name, self.description, self.parameters = listed.name, listed.description or "", dict(listed.input_schema)
        self.timeout, self.on_fault = spec.timeout, spec.on_fault
        self._lease = lease
        self.open, self.close = lease.open, lease.close

    async def call(self, arguments: dict[str, Any]) -> ToolOutput:
        """Return the text and images of the tool's answer."""
        return await self._lease.call(self.name, arguments)


class McpServers:
    """The servers of one specification, for the episodes of one event loop."""

    def __init__(self, spec: McpSpec) -> None:
        self._spec, self._servers, self._asking = spec, servers(spec), asyncio.Lock()

    async def episode(self, field: str) -> Sequence[Tool]:
        """Return the tools of one episode. Raises ConfigError if the server offers none."""
        key = msgspec.json.encode(self._spec)
        async with self._asking:
            if key not in _listed:
                _listed[key] = await ask(self._spec, field)
        lease = self._servers.lease()
        return [McpTool(one, lease, self._spec) for one in _listed[key]]

    async def close(self) -> None:
        """Stop the servers."""
        await self._servers.close()


def servers(spec: McpSpec) -> Servers:
    """Return the servers of a specification; none is started yet."""
    starter = Starter(spec.name, lambda: connection(spec), start_timeout=spec.start_timeout, restarts=spec.restarts)
    return PerEpisode(starter, spec.warm) if spec.per_episode else Shared(starter)


def connection(spec: McpSpec) -> Connection:
    """Return a connection that is not started yet."""
    if spec.url:
        return Connection(spec.name, lambda said, lost: _http(spec.url, resolved(spec.headers)))
    program, *words = spec.command
    command = [sys.executable if program == "python" else program, *words]
    env = {name: os.environ[name] for name in INHERITED if name in os.environ} | resolved(spec.env)
    return Connection(spec.name, lambda said, lost: stdio(command, env, spec.folder, said, lost))


async def ask(spec: McpSpec, field: str) -> list[mcp_types.Tool]:
    """Return the wanted tools that a server offers. Raises ConfigError for the field that names the server."""
    session = connection(spec)
    try:
        await session.start(spec.start_timeout)
        found = {tool.name: tool for tool in await session.tools()}
    except EpisodeFailed as failed:
        raise ConfigError(field, spec.name, f"Its tools could not be listed: {failed.located}") from None
    finally:
        await session.end("its tools are known")
    if missing := [name for name in spec.only if name not in found]:
        raise ConfigError(f"{field}.only", missing, f"The tools of {spec.name} are {', '.join(sorted(found))}.")
    wanted = [found[name] for name in spec.only or found]
    for tool in wanted:
        try:
            Draft202012Validator.check_schema(tool.input_schema)
        except SchemaError as error:
            raise ConfigError(
                field, spec.name, f"The schema of its tool {tool.name} is invalid: {error.message}."
            ) from None
    return wanted


def resolved(values: Mapping[str, str]) -> dict[str, str]:
    """Replace "$NAME" by the environment's value (McpSpec.check has verified that it exists)."""
    return {name: os.environ[value[1:]] if value.startswith("$") else value for name, value in values.items()}


@asynccontextmanager
async def _http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    timeout = httpx2.Timeout(30.0, read=HTTP_SECONDS)
    hooks: dict[str, list[Callable[..., Any]]] = {"response": [_bounded]}
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=timeout, event_hooks=hooks) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MOST_BYTES) as streams,
    ):
        yield streams


async def _bounded(response: httpx2.Response) -> None:
    """Bound the size of a JSON answer, because the client of the `mcp` package reads one of any length."""
    if response.headers.get("content-type", "").startswith("application/json"):
        response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for data in self._stream:
            size += len(data)
            if size > MOST_BYTES:
                raise httpx2.StreamError(TOO_LARGE)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


def _off_the_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in a thread with its own event loop, because the caller may run in one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
