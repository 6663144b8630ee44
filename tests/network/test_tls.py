"""Nothing is sent to who cannot show a certificate of the run, by any client that carries the run's key."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from aiohttp import ClientError

from asyncrl.launch.watch import HealthWatch
from asyncrl.network.addresses import Access
from asyncrl.network.connections import aiohttp_session
from asyncrl.network.tls import Authority, Signed, signed

KEY = "the-run's-key"
HERE = "https://127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Listener:
    """Keeps what it is sent, and answers 200."""

    def __init__(self, shows: Signed | None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"{HERE}:{self._socket.getsockname()[1]}/health"
        self.heard = b""
        self._context = None
        if shows:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(shows.server)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                return
            connection.settimeout(60.0 if self._context else 1.0)
            with connection, suppress(OSError):
                if self._context:
                    with self._context.wrap_socket(connection, server_side=True) as shown:
                        self._hear(shown)
                else:
                    self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        while part := connection.recv(4096):
            self.heard += part
            if b"\r\n\r\n" in self.heard:
                connection.sendall(ANSWER)
                return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextmanager
def listening(shows: Signed | None) -> Iterator[Listener]:
    made = Listener(shows)
    try:
        yield made
    finally:
        made.close()


def of_a_run(folder: Path, *hosts: str) -> tuple[Access, Signed | None]:
    """Return the context of a run's clients, and that of its servers at the first of these addresses."""
    folder.mkdir()
    authority = Authority.create(folder)
    authority.sign(f"https://{host}:1" for host in hosts)
    return Access(KEY, authority.certificate), signed(folder, f"https://{hosts[0]}:1")


def by_httpx(access: Access, url: str) -> bool:
    """The trainer's control calls, the launcher's."""
    try:
        return httpx.get(url, **access.http).status_code == 200
    except httpx.TransportError:
        return False


def by_aiohttp(access: Access, url: str) -> bool:
    """Generation, and the teacher's scores."""

    async def ask() -> bool:
        async with aiohttp_session(access) as http, http.get(url, headers=access.headers) as answer:
            return answer.status == 200

    try:
        return asyncio.run(ask())
    except ClientError:
        return False


def by_watch(access: Access, url: str) -> bool:
    """The launcher's question to each server: a listener that is refused is as one that is dead."""
    now, deadline = 0.0, time.monotonic() + 60.0
    watch = HealthWatch(url, access, 60.0, lambda: now)
    now = 6.0
    assert not watch.hangs()
    while watch._socket:  # until there is an answer, or nobody
        assert time.monotonic() < deadline
        assert not watch.hangs()
        time.sleep(0.002)
    return True


CLIENTS = pytest.mark.parametrize("client", [by_httpx, by_aiohttp, by_watch])


@CLIENTS
def test_own_server_at_its_address_gets_the_key(client: Callable[[Access, str], bool], tmp_path: Path) -> None:
    access, shows = of_a_run(tmp_path / "run", "127.0.0.1")
    with listening(shows) as listener:
        assert client(access, listener.url)
    assert KEY.encode() in listener.heard


@CLIENTS
@pytest.mark.parametrize("who", ["another run", "another address of the run", "nobody"])
def test_other_listener_gets_no_byte_of_a_request(
    client: Callable[[Access, str], bool], who: str, tmp_path: Path
) -> None:
    access, _ = of_a_run(tmp_path / "run", "127.0.0.1")
    shows = {
        "another run": of_a_run(tmp_path / "other", "127.0.0.1")[1],
        "another address of the run": of_a_run(tmp_path / "elsewhere", "127.0.0.2")[1],
        "nobody": None,
    }[who]
    if who == "another address of the run":
        access = Access(KEY, Authority(tmp_path / "elsewhere").certificate)
    with listening(shows) as listener:
        assert client(access, listener.url) is (client is by_watch)
    assert KEY.encode() not in listener.heard
    assert b"HTTP/1.1" not in listener.heard


def test_old_signature_is_refused_after_a_new_command(tmp_path: Path) -> None:
    access, shows = of_a_run(tmp_path / "run", "127.0.0.1")
    with listening(shows) as listener:
        assert by_httpx(access, listener.url)
        assert not by_httpx(Access(KEY, Authority.create(tmp_path / "run").certificate), listener.url)


def test_nobody_else_can_read_the_keys(tmp_path: Path) -> None:
    _, shows = of_a_run(tmp_path / "run", "127.0.0.1", "[::1]", "node-7.cluster")
    assert shows
    folder = shows.server.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        ("ca.pem", "ca.key", "127.0.0.1.pem", "::1.pem", "node-7.cluster.pem"), 0o600
    )


def test_server_of_http_shows_nothing(tmp_path: Path) -> None:
    assert signed(tmp_path, "http://127.0.0.1:1") is None
