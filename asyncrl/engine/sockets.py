"""HTTP connections of the client to the router and to the teacher's engines, without a limit on their number."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession, TCPConnector
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

from asyncrl.access import Access

IDLE_SECONDS = 2.0
"""Keep-alive time, shorter than uvicorn's 5 s: a connection that the server is closing must not be reused."""


def transport(access: Access) -> AiohttpTransport:
    """Return an httpx transport that uses aiohttp's connection pool.

    The pool of httpx searches all of its connections at every request.
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
