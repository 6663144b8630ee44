"""Streaming of one /generate request, and the transport that carries requests.

Errors that may be retried raise StreamBroken; all others raise EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
from aiohttp import ClientSession, TCPConnector
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

from asyncrl.engine.partial_completion import PASSING, StreamChunk, decode_piece
from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access

ROUTING_KEY = "X-SMG-Routing-Key"
"""Requests with the same key go to the same engine, under the router's policy `manual`."""


NO_WORKER, STREAM_ERROR = "model_not_found", "stream_error"
"""Names of the router's own errors. The first means that it has no healthy engine (smg 1.13 answers 404), the second
that the engine broke off the answer (smg then ends the stream with an error event)."""


class StreamBroken(Exception):
    """Raised when an answer ends early through no fault of the request, so that it may be continued elsewhere."""


class GenerateEndpoint:
    """The router's /generate. It uses the transport without httpx's client, whose redirects, cookies and merging of
    headers took a fifth of the CPU time of a request."""

    def __init__(
        self, router: str, access: Access, timeout: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`timeout` is that of the next chunk, in seconds."""
        self._transport = transport or aiohttp_transport(access)
        self._url = httpx.URL(f"{router}/generate")
        self._headers = [("Content-Type", "application/json"), *access.headers.items()]
        self._extensions = {"timeout": httpx.Timeout(timeout, connect=30.0).as_dict()}

    async def stream(
        self, request: dict[str, Any], routing_key: str, traceparent: str = ""
    ) -> AsyncIterator[StreamChunk]:
        """Yield the events of one request as they arrive. Raises StreamBroken, or EngineError if it is refused."""
        headers = [*self._headers, (ROUTING_KEY, routing_key)]
        if traceparent:
            headers.append(("traceparent", traceparent))
        content = msgspec.json.encode(request)
        sent = httpx.Request("POST", self._url, headers=headers, content=content, extensions=self._extensions)
        try:
            response = await self._transport.handle_async_request(sent)
            try:
                async for piece in _pieces(response):
                    yield piece
                return
            finally:
                await response.stream.aclose()  # type: ignore[union-attr]
        except httpx.HTTPError as error:
            raise StreamBroken(f"{type(error).__name__} {error}".strip()) from None
        except msgspec.DecodeError as error:
            raise StreamBroken(f"the stream of an engine has an invalid event: {error}") from None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


async def _pieces(response: httpx.Response) -> AsyncIterator[StreamChunk]:
    stream: Any = response.stream
    if response.status_code != 200:
        text = b"".join([chunk async for chunk in stream]).decode(errors="replace")[:500]
        problem = f"the router answered {response.status_code}: {text}"
        raise StreamBroken(problem) if response.status_code in PASSING or NO_WORKER in text else EngineError(problem)
    waiting = bytearray()
    async for chunk in stream:
        for event in _events(waiting, chunk):
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            piece = decode_piece(data)
            if piece.error is not None:
                problem = f"the engine failed a request: {piece.error}"
                passing = piece.error.get("code") in PASSING or piece.error.get("type") == STREAM_ERROR
                raise StreamBroken(problem) if passing else EngineError(problem)
            yield piece
    raise StreamBroken("the stream ended without its last event")


def _events(waiting: bytearray, chunk: bytes) -> Iterator[bytes]:
    """Yield the complete events that end in this network chunk; `waiting` keeps the rest.

    An event may have 100 MB (routed experts) in a thousand chunks, so each byte is searched and copied only once.
    """
    search_from = max(0, len(waiting) - 1)
    waiting += chunk
    while (end := waiting.find(b"\n\n", search_from)) >= 0:
        yield bytes(waiting[:end])
        del waiting[: end + 2]
        search_from = 0


IDLE_SECONDS = 2.0
"""Keep-alive time, shorter than uvicorn's 5 s: a connection that the server is closing must not be reused."""


def aiohttp_transport(access: Access) -> AiohttpTransport:
    """Return an httpx transport that uses aiohttp's connection pool.

    It replaces httpx's own pool, which searches all of its connections at every request.
    """

    def session() -> ClientSession:
        return ClientSession(connector=_Connector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=access.context))

    return AiohttpTransport(client=session)


class _Connector(TCPConnector):
    """Connector that aborts connections that are not reused.

    Under TLS, aiohttp would wait up to 30 s for the peer to close, although the peer may be dead, and the wait could
    outlive the event loop.
    """

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if (should_close or protocol.should_close) and protocol.transport is not None:
            protocol.transport.abort()
        super()._release(key, protocol, should_close=should_close)
