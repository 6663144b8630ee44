"""JSON over HTTP to a set of equivalent servers: reward models, or engines that judge.

A request goes to the server with the fewest of our requests in flight; a server that has failed is avoided for some
seconds while there are others. Transient faults (no connection, timeout, 408, 429, 5xx) are retried: immediately at
another server and, when all have failed, after growing delays. Nothing else is retried: a refusal, or an answer that is
not JSON, would be repeated.

waits for     one of `max_running` places, a server (`request_timeout`), delays
unblocked by  an answer; in any case after `deadline`
on a failure  EpisodeFailed with the caller's reason
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from pydantic import Field

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.servers.choice import EquivalentServers
from asyncrl.network.addresses import Access
from asyncrl.rewards.parameters import Count, Name, Seconds, Urls
from asyncrl.settings import Section

IDLE_SECONDS = 2.0
"""Keep-alive of a connection. It is shorter than uvicorn's 5 s, because a connection that the server is closing must
not be reused.
"""
JSON = {"Content-Type": "application/json"}
PASSING = frozenset({408, 429, *range(500, 600)})


class RefusedError(EpisodeFailed):
    """The server refuses the request (4xx)."""


class _PassingError(Exception):
    """Transient error: another attempt may succeed."""


class ServerSettings(Section):
    """The servers that a reward asks, and how much it asks of them."""

    urls: Urls = Field(default_factory=list)
    api_key_env: Name | None = None
    """Environment variable that holds the key."""
    max_running: Count = 64
    """Concurrent requests."""
    request_timeout: Seconds = 120.0
    """Seconds for one attempt."""
    deadline: Seconds = 240.0
    """Seconds for an answer, with all attempts."""


class Endpoints:
    """Client of a set of servers, for one event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        reason: str,
        *,
        authority: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`urls` may be empty until the servers are known."""
        key = settings.api_key_env
        if key and not os.environ.get(key):
            raise ConfigError("api_key_env", key, "This environment variable is not set, or empty.")
        access = Access(os.environ[key] if key else "", authority)
        self._servers = EquivalentServers(settings.urls)
        self._reason = reason
        self._deadline = settings.deadline
        self._room = asyncio.Semaphore(settings.max_running)
        self._in_flight: Counter[str] = Counter()
        self._http = httpx.AsyncClient(
            **access.http,
            transport=transport,
            timeout=httpx.Timeout(settings.request_timeout, connect=min(10.0, settings.request_timeout)),
            limits=httpx.Limits(max_connections=settings.max_running, keepalive_expiry=IDLE_SECONDS),
        )

    @property
    def urls(self) -> list[str]:
        """The servers. The list may be set later, before the first request."""
        return self._servers.urls

    @urls.setter
    def urls(self, urls: Sequence[str]) -> None:
        self._servers = EquivalentServers(urls)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return a server's answer. Raises EpisodeFailed, or its subclass RefusedError."""
        if not self.urls:
            raise ConfigError("urls", self.urls, "No server is set.")
        content = msgspec.json.encode(body, enc_hook=str)  # a row of parquet may hold dates, bytes and more
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._deadline):
                return await self._post(path, content, failures)
        except TimeoutError:
            last = f"; the last one: {failures[-1]}" if failures else ""
            detail = f"no answer within {self._deadline:g} s, after {len(failures)} failed attempts{last}"
            raise EpisodeFailed(self._reason, detail) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _post(self, path: str, content: bytes, failures: list[str]) -> Any:
        while True:
            async with self._room:
                url = self._servers.pick(self._in_flight.__getitem__)
                self._in_flight[url] += 1
                try:
                    return await self._ask(f"{url}{path}", content)
                except _PassingError as error:
                    failures.append(f"{url}: {error}")
                finally:
                    self._in_flight[url] -= 1
            await self._servers.failed(url, len(failures))

    async def _ask(self, url: str, content: bytes) -> Any:
        try:
            response = await self._http.post(url, content=content, headers=JSON)
        except httpx.TransportError as error:
            raise _PassingError(f"{type(error).__name__} {error}".strip()) from None
        if response.status_code in PASSING:
            raise _PassingError(f"{response.status_code} {response.text[:200]}")
        if response.status_code != 200:
            raise RefusedError(self._reason, f"{url} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError:
            raise EpisodeFailed(self._reason, f"{url} answered with invalid JSON: {response.text[:500]}") from None
