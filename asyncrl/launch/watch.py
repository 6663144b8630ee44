"""Servers that live and do not answer: an engine or a router that was stopped, or waits for something for ever.

Asked from the supervisor's loop, which must not wait, nor have threads beside its forks: so by a socket that does not
block. Who refuses or resets the connection is dead, or not up yet: the supervisor sees that by itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

EVERY_SECONDS = 5.0


class Watch:
    """One server, asked every few seconds; it hangs when it has not begun to answer for `patience` seconds."""

    def __init__(self, url: str, api_key: str, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        address = urlsplit(url)
        self._address = str(address.hostname), address.port or 80
        self._request = (
            f"GET {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        self._patience, self._clock = patience, clock
        self._socket: socket.socket | None = None
        self._asked_at, self._sent = clock(), False

    def hangs(self) -> bool:
        """Ask when it is time, look for an answer otherwise; to be called again and again."""
        waited = self._clock() - self._asked_at
        if self._socket is None:
            if waited >= EVERY_SECONDS:
                self._ask()
            return False
        if self._heard(self._socket):
            self.forget()
            return False
        return waited > self._patience

    def forget(self) -> None:
        """The question under way, if any: it was answered, or the server is another process now."""
        if self._socket:
            self._socket.close()
        self._socket, self._asked_at = None, self._clock()

    def _ask(self) -> None:
        self._socket, self._sent, self._asked_at = socket.socket(), False, self._clock()
        self._socket.setblocking(False)
        self._socket.connect_ex(self._address)

    def _heard(self, connection: socket.socket) -> bool:
        """Whether an answer has begun, or there is nobody to give one."""
        try:
            if not self._sent:
                connection.send(self._request)
                self._sent = True
            connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
