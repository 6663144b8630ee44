"""The client's connections to the router and the teacher's engines: any number of them."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession, TCPConnector
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

from asyncrl.access import Access

IDLE_SECONDS = 2.0
"""A connection is kept for less than uvicorn's 5 s: one that the server is closing must not be used again."""


def transport(access: Access) -> AiohttpTransport:
    """Return a transport for httpx. Its own pool looks through all of its connections at every request: aiohttp's takes
    its place."""

    def session() -> ClientSession:
        return ClientSession(connector=_Connector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=access.context))

    return AiohttpTransport(client=session)


class _Connector(TCPConnector):
    """Whose connections end at once when they are not to be used again: under TLS aiohttp's would wait up to 30 s for
    the other end's farewell, which may be dead, or outlive the event loop."""

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if (should_close or protocol.should_close) and protocol.transport is not None:
            protocol.transport.abort()
        super()._release(key, protocol, should_close=should_close)
