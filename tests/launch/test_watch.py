"""A server that is running but does not answer is found; one that is dead, or not up yet, is not taken for it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.launch.restarts import RestartPolicy
from asyncrl.launch.watch import EVERY_SECONDS, HealthWatch
from asyncrl.network.addresses import READY, Access
from asyncrl.network.tls import Authority, signed
from tests.fakes import Clock

PATIENCE = 30.0


@contextmanager
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60.0)
        yield listening


def watched(listening: socket.socket, clock: Callable[[], float]) -> HealthWatch:
    return HealthWatch(f"http://127.0.0.1:{listening.getsockname()[1]}/health", Access("key0"), PATIENCE, clock)


def until(happened: Callable[[], object]) -> None:
    """The kernel takes a moment, also on one machine."""
    deadline = time.monotonic() + 60.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def asked(watch: HealthWatch, clock: Clock) -> None:
    """The next question is on its way."""
    clock.now += EVERY_SECONDS
    until(lambda: not watch.hangs() and watch._sent)


def test_silent_server_hangs_after_its_patience() -> None:
    with server() as listening:
        watch = watched(listening, clock := Clock(0.0))
        asked(watch, clock)
        clock.now += PATIENCE
        assert not watch.hangs()
        clock.now += 0.1
        assert watch.hangs()
        watch.forget()  # it was killed, and another takes its place
        assert not watch.hangs()
        clock.now += PATIENCE
        assert not watch.hangs()  # that is asked first
        watch.forget()


def test_answer_resets_the_patience_and_carries_the_key() -> None:
    with server() as listening:
        watch = watched(listening, clock := Clock(0.0))
        for _ in range(3):
            asked(watch, clock)
            clock.now += PATIENCE
            connection, _ = listening.accept()
            with connection:
                request = connection.recv(4096).decode()
                connection.sendall(b"HTTP/1.1 503 busy\r\n\r\n")  # any answer is a sign of life
            assert request.startswith("GET /health HTTP/1.1\r\n")
            assert "Authorization: Bearer key0\r\n" in request
            clock.now += 1.0
            until(lambda: not watch.hangs())


@pytest.mark.parametrize("answers", [True, False])
def test_server_with_a_certificate_is_asked_over_tls(answers: bool, tmp_path: Path) -> None:
    with server() as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        authority = Authority.create(tmp_path)
        authority.sign([url])
        files = signed(tmp_path, url)
        assert files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.server)
        watch = HealthWatch(f"{url}/health", Access("key0", authority.certificate), PATIENCE, clock := Clock(0.0))
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(lambda: context.wrap_socket(listening.accept()[0], server_side=True))
            asked(watch, clock)
            with accepted.result() as connection:
                assert connection.recv(4096).startswith(b"GET /health HTTP/1.1\r\n")
                clock.now += PATIENCE + 1.0
                if answers:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    until(lambda: not watch.hangs())
                else:
                    assert watch.hangs()
        watch.forget()


@pytest.mark.parametrize("ending", ["refuses", "closes"])
def test_server_that_is_dead_does_not_hang(ending: str) -> None:
    with server() as listening:
        watch = watched(listening, clock := Clock(0.0))
        if ending == "refuses":
            listening.close()
        clock.now += EVERY_SECONDS
        watch.hangs()
        if ending == "closes":
            listening.accept()[0].close()
        clock.now += 2 * PATIENCE
        until(lambda: not watch.hangs())


def test_policy_gives_up_who_hangs_once_all_were_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as listening:
        watch = watched(listening, clock := Clock(0.0))
        policy = RestartPolicy(tmp_path, watches={"router": watch})
        asked(watch, clock)
        clock.now += PATIENCE + 1
        assert policy.hanging() == []  # it is still starting
        (tmp_path / READY).touch()
        assert policy.hanging() == ["router"]
        assert policy.hanging() == []
        assert "router is running but does not answer" in capsys.readouterr().err
