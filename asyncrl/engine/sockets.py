"""The client's connections to router and engines: any number of them, and no pause between two pieces of an answer.

The router sends a piece only once the one before was acknowledged (it leaves Nagle's algorithm on), and a receiver that
has nothing to say acknowledges after 40 ms: every answer would come as much later, and every turn of an agent. So each
read is acknowledged at once (tcp(7), TCP_QUICKACK, which does not last: it is set anew with every read).
"""

from __future__ import annotations

import socket
from typing import Any

from aiohttp import ClientSession, TCPConnector
from httpx_aiohttp import AiohttpTransport

IDLE_SECONDS = 2.0
"""A connection is kept for less than uvicorn's 5 s: one that the server is closing must not be used again."""


def transport() -> AiohttpTransport:
    """For httpx. Its own pool looks through all of its connections at every request: aiohttp's takes its place."""

    def session() -> ClientSession:
        connector = TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_open)
        return ClientSession(connector=connector)

    return AiohttpTransport(client=session)


class _Prompt(socket.socket):
    """Acknowledges what it has read."""

    def recv(self, *args: Any) -> bytes:
        data = super().recv(*args)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data

    def recv_into(self, *args: Any) -> int:
        size = super().recv_into(*args)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return size


def _open(address: Any) -> socket.socket:
    family, kind, protocol, *_ = address
    made = (_Prompt if hasattr(socket, "TCP_QUICKACK") else socket.socket)(family, kind, protocol)
    made.setblocking(False)
    return made
