"""Connections of aiohttp to a run's servers, where httpx would take too much time."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import ClientSession, TCPConnector
from aiohttp.client_proto import ResponseHandler

from asyncrl.network.addresses import Access

IDLE_SECONDS = 2.0
"""Keep-alive time, shorter than uvicorn's 5 s: a connection that the server is closing must not be reused."""


def aiohttp_session(access: Access, **settings: Any) -> ClientSession:
    """Return a session of aiohttp with connections to a run's servers."""
    context = access.context if access.authority else True
    connector = _Connector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=context)
    return ClientSession(connector=connector, auto_decompress=False, **settings)


class _Connection(ResponseHandler):
    """Connection whose read timeout is checked when its timer fires. aiohttp sets a new timer for every chunk, which
    takes a tenth of the CPU time of a request."""

    _heard = 0.0

    def _reschedule_timeout(self) -> None:
        self._heard = self._loop.time()
        if self._read_timeout and self._read_timeout_handle is None:
            self._read_timeout_handle = self._loop.call_later(self._read_timeout, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        self._read_timeout_handle = None
        left = self._heard + (self._read_timeout or 0.0) - self._loop.time()
        if self._read_timeout and left > 0:
            self._read_timeout_handle = self._loop.call_later(left, self._on_read_timeout)
        else:
            super()._on_read_timeout()


class _Connector(TCPConnector):
    """Connector that aborts connections that are not reused.

    Under TLS, aiohttp would wait up to 30 s for the peer to close, although the peer may be dead, and the wait could
    outlive the event loop.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory: Any = partial(_Connection, loop=self._loop)

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if (should_close or protocol.should_close) and protocol.transport is not None:
            protocol.transport.abort()
        super()._release(key, protocol, should_close=should_close)
