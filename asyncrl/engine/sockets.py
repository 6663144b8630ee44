"""The client's connections to the router and the teacher's engines: any number of them."""

from __future__ import annotations

from aiohttp import ClientSession, TCPConnector
from httpx_aiohttp import AiohttpTransport

from asyncrl.access import Access

IDLE_SECONDS = 2.0
"""A connection is kept for less than uvicorn's 5 s: one that the server is closing must not be used again."""


def transport(access: Access) -> AiohttpTransport:
    """Return a transport for httpx. Its own pool looks through all of its connections at every request: aiohttp's takes
    its place."""

    def session() -> ClientSession:
        return ClientSession(connector=TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=access.context))

    return AiohttpTransport(client=session)
