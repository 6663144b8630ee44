"""Detection of servers that are alive but do not answer: an engine or a router that was stopped, or waits forever.

The queries are sent from the supervisor's loop, which must neither block nor run threads alongside its forks, so they
use a non-blocking socket. A server that refuses or resets the connection is dead or not up yet, which the supervisor
detects itself.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from asyncrl.network.addresses import Access

EVERY_SECONDS = 5.0


class HealthWatch:
    """Watches one server with a query every few seconds. It hangs if it has not begun to answer after `patience`
    seconds."""

    def __init__(self, url: str, access: Access, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), address.port or 80
        self._context = access.context if address.scheme == "https" else None
        headers = "".join(f"{name}: {value}\r\n" for name, value in access.headers.items())
        self._request = (
            f"GET {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\n{headers}Connection: close\r\n\r\n"
        ).encode()
        self._patience, self._clock = patience, clock
        self._socket: socket.socket | None = None
        self._asked_at, self._connected, self._sent = clock(), False, False

    def hangs(self) -> bool:
        """Return whether the server hangs. Sends a query when one is due, otherwise looks for the answer; call it
        repeatedly."""
        waited = self._clock() - self._asked_at
        if self._socket is None:
            if waited >= EVERY_SECONDS:
                self._ask()
            return False
        if self._heard():
            self.forget()
            return False
        return waited > self._patience

    def forget(self) -> None:
        """Drop the pending query, if any: it was answered, or the server is a new process."""
        if self._socket:
            self._socket.close()
        self._socket, self._asked_at = None, self._clock()

    def _ask(self) -> None:
        self._socket, self._asked_at = socket.socket(), self._clock()
        self._connected = self._sent = False
        self._socket.setblocking(False)
        self._socket.connect_ex((self._host, self._port))

    def _heard(self) -> bool:
        """Return whether an answer has begun, or there is nobody left to answer."""
        assert self._socket
        try:
            if not self._connected:
                code = self._socket.connect_ex((self._host, self._port))  # asks how the connection is getting on
                if code not in (0, errno.EISCONN):
                    return code not in (errno.EINPROGRESS, errno.EALREADY)
                self._connected = True
                if self._context:
                    self._socket = self._context.wrap_socket(
                        self._socket, server_hostname=self._host, do_handshake_on_connect=False
                    )
            if not self._sent:
                if isinstance(self._socket, ssl.SSLSocket):
                    self._socket.do_handshake()
                self._socket.send(self._request)
                self._sent = True
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True
        return True
