"""One request to /generate and its server-sent events; what may be tried again, told from what may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from asyncrl.engine.answer import PASSING, Piece, decode_piece
from asyncrl.errors import EngineError

ROUTING_KEY = "X-SMG-Routing-Key"
"""Requests with the same key go to the same engine, under the router's policy `manual`."""


class Broken(Exception):
    """The answer ended before its time, for a reason that is not the request's: it may be continued elsewhere."""


async def pieces(
    http: httpx.AsyncClient, request: dict[str, Any], routing_key: str, *, engine: str = ""
) -> AsyncIterator[Piece]:
    """The events of one request as they come, from the router or from an engine's URL. Raises Broken, or EngineError
    when the request is refused."""
    url, asked = f"{engine}/generate", engine or "the router"
    headers = {"Content-Type": "application/json", ROUTING_KEY: routing_key}
    try:
        async with http.stream("POST", url, content=msgspec.json.encode(request), headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:500]
                problem = f"{asked} answered {response.status_code}: {text}"
                raise Broken(problem) if response.status_code in PASSING else EngineError(problem)
            waiting = bytearray()
            async for chunk in response.aiter_raw():
                for event in _events(waiting, chunk):
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    piece = decode_piece(data)
                    if piece.error is not None:
                        problem = f"the engine failed a request: {piece.error}"
                        raise Broken(problem) if piece.error.get("code") in PASSING else EngineError(problem)
                    yield piece
    except httpx.HTTPError as error:
        raise Broken(f"{type(error).__name__} {error}".strip()) from None
    except msgspec.DecodeError as error:
        raise Broken(f"no event of an engine: {error}") from None
    raise Broken("the stream ended without its last event")


def _events(waiting: bytearray, chunk: bytes) -> Iterator[bytes]:
    """The whole events that end in this chunk; `waiting` keeps the rest. An event may be of 100 MB (routed experts) in
    a thousand chunks: it is searched and copied once."""
    search_from = max(0, len(waiting) - 1)
    waiting += chunk
    while (end := waiting.find(b"\n\n", search_from)) >= 0:
        yield bytes(waiting[:end])
        del waiting[: end + 2]
        search_from = 0
