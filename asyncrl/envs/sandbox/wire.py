"""Frames between the rollout process and a sandbox's supervisor, over a stream socket.

    4 bytes length of the header | 4 bytes length of the body | header (JSON object) | body

Both ends are ours; a guest cannot reach the socket.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Header = dict[str, Any]
LENGTHS = struct.Struct("!II")


def frame(header: Header, body: bytes = b"") -> bytes:
    """One message."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def receive(connection: socket.socket) -> tuple[Header, bytes] | None:
    """The next message of a blocking socket; None when the other end has gone."""
    lengths = _exactly(connection, LENGTHS.size)
    if lengths is None:
        return None
    head_size, body_size = LENGTHS.unpack(lengths)
    rest = _exactly(connection, head_size + body_size)
    return None if rest is None else (json.loads(rest[:head_size]), bytes(rest[head_size:]))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            count = connection.recv_into(view[got:])
        except ConnectionResetError:
            return None
        if count == 0:
            return None
        got += count
    return data
