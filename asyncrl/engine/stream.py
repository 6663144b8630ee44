"""Streaming of one /generate request.

Errors that may be retried raise StreamBroken; all others raise EngineError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import ClientError, ClientResponse, ClientTimeout, DummyCookieJar

from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access
from asyncrl.network.connections import aiohttp_session

ROUTING_KEY = "X-SMG-Routing-Key"
"""Requests with the same key go to the same engine, under the router's policy `manual`."""
ROUTED_TO = "X-SMG-Routed-Worker-Id"
"""URL of the engine that answers, in the router's answer."""

PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP status codes of requests that may succeed later or elsewhere. Any other error is the request's own fault."""
NO_WORKER, STREAM_ERROR = "model_not_found", "stream_error"
"""Names of the router's own errors. The first means that it has no healthy engine (smg 1.13 answers 404), the second
that the engine broke off the answer (smg then ends the stream with an error event)."""
Headers = Callable[[str, str, int], Mapping[str, str]]
"""Returns further headers of a request, from the group and name of its first sample, and the number of the request
among those of that sample."""


def no_headers(group: str, sample: str, number: int) -> Mapping[str, str]:
    """Return none."""
    return {}


ABORT_SECONDS = 5.0


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None  # set when the engine refused the request


class ChunkMeta(msgspec.Struct):
    """What an engine says of a sample; all of it with the last chunk alone."""

    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_versions: list[_Span] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_time: float | None = None  # seconds in the engine's queue, if the engine measures (--enable-metrics)


class StreamChunk(msgspec.Struct):
    """One streaming chunk: a server-sent event of /generate."""

    output_ids: list[int] = []
    meta_info: ChunkMeta = msgspec.field(default_factory=ChunkMeta)
    index: int = 0
    error: dict | None = None


def chunk_decoder(fields: Mapping[str, Any]) -> Callable[[bytes], StreamChunk]:
    """Return a decoder of events whose meta_info may have further fields of these types; bytes are base64 on the
    wire."""
    further = [(name, kind | None, None) for name, kind in fields.items()]
    meta = msgspec.defstruct("ExtendedMeta", further, bases=(ChunkMeta,))
    given = ("meta_info", meta, msgspec.field(default_factory=meta))
    chunk: Any = msgspec.defstruct("ExtendedChunk", [given], bases=(StreamChunk,))
    return msgspec.json.Decoder(chunk).decode


class StreamBroken(Exception):
    """Raised when an answer ends early through no fault of the request, so that it may be continued elsewhere."""


class GenerateEndpoint:
    """The router's /generate. It uses aiohttp without httpx around it, whose requests and responses took a sixth of the
    CPU time of a request."""

    def __init__(
        self,
        router: str,
        access: Access,
        timeout: float,
        session: Any = None,
        reads: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`timeout` is that of the next chunk, in seconds; `session` replaces aiohttp's. `reads` are further
        fields of an answer's meta_info that are read, with their types."""
        self._decode = chunk_decoder(reads)
        self._url = f"{router}/generate"
        self._access = access
        self._session = session
        self._timeout = ClientTimeout(sock_connect=30.0, sock_read=timeout)

    async def stream(
        self, request: dict[str, Any], routing_key: str, more: Mapping[str, str], routed: Callable[[str], object]
    ) -> AsyncIterator[StreamChunk]:
        """Yield the events of one request as they arrive, after `routed` was called with the URL of its engine. `more`
        are further headers. Raises StreamBroken, or EngineError if the request is refused."""
        headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key, **self._access.headers, **more}
        if self._session is None:  # needs a running event loop
            self._session = aiohttp_session(self._access, timeout=self._timeout, cookie_jar=DummyCookieJar())
        try:
            body = msgspec.json.encode(request)
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                await _check(response)
                routed(response.headers.get(ROUTED_TO, ""))
                waiting = bytearray()
                async for chunk in response.content.iter_any():
                    for event in _events(waiting, chunk):
                        if (piece := _piece(event, self._decode)) is None:
                            return
                        yield piece
                raise StreamBroken("the stream ended without its last event")
        except ClientError as error:
            raise StreamBroken(f"{type(error).__name__} {error}".strip()) from None
        except msgspec.DecodeError as error:
            raise StreamBroken(f"the stream of an engine has an invalid event: {error}") from None

    async def abort(self, engine: str, request: str) -> None:
        """Tell the engine at this URL to abort the request of this name. If that fails, the answer only takes longer,
        to its own end."""
        headers = {"Content-Type": "application/json", **self._access.headers}
        body = msgspec.json.encode({"rid": request})
        with suppress(ClientError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                url = f"{engine}/abort_request"
                async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                    await response.read()

    async def close(self) -> None:
        """Close the connections."""
        if self._session:
            await self._session.close()


async def _check(response: ClientResponse) -> None:
    """Raise StreamBroken or EngineError if the request was refused."""
    if response.status != 200:
        text = (await response.read()).decode(errors="replace")[:500]
        problem = f"the router answered {response.status}: {text}"
        raise StreamBroken(problem) if response.status in PASSING or NO_WORKER in text else EngineError(problem)


def _piece(event: bytes, decode: Callable[[bytes], StreamChunk]) -> StreamChunk | None:
    """Return what an event says, or None if it is the last. Raises StreamBroken or EngineError if it is an error."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return None
    piece = decode(data)
    if piece.error is not None:
        problem = f"the engine failed a request: {piece.error}"
        passing = piece.error.get("code") in PASSING or piece.error.get("type") == STREAM_ERROR
        raise StreamBroken(problem) if passing else EngineError(problem)
    return piece


def _events(waiting: bytearray, chunk: bytes) -> Iterator[bytes]:
    """Yield the complete events that end in this network chunk; `waiting` keeps the rest.

    An event may have 100 MB (of what extensions ask for) in a thousand chunks, so each byte is searched and copied only
    once.
    """
    if not waiting and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2:  # one event, as usually
        yield chunk[:-2]
        return
    search_from = max(0, len(waiting) - 1)
    waiting += chunk
    while (end := waiting.find(b"\n\n", search_from)) >= 0:
        yield bytes(waiting[:end])
        del waiting[: end + 2]
        search_from = 0
