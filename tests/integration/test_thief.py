"""Another user of the machine binds the ports of a run's servers before these listen, and obtains nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from asyncrl.network.addresses import Addresses
from tests.integration.running import finish, nothing_is_left, start

pytestmark = pytest.mark.integration

NOBODY = 65534
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextmanager
def thief(run_dir: Path, heard: Path) -> Iterator[None]:
    """Run a process that knows the addresses of the run's engines, listens there first, and records what it receives.

    It belongs to another user if root runs the tests.
    """
    process = multiprocessing.get_context("fork").Process(target=_steal, args=(run_dir, heard), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _steal(run_dir: Path, heard: Path) -> None:
    loot = heard.open("ab", buffering=0)
    ports: set[int] = set()
    while not ports:
        with suppress(OSError, ValueError):  # not written yet, or not whole
            ports = {int(url.rpartition(":")[2]) for url in Addresses.read(run_dir).engines}
        time.sleep(0.01)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    listening: dict[int, socket.socket] = {}
    while True:
        for port in ports - listening.keys():
            with suppress(OSError):  # the server was faster
                listening[port] = socket.create_server(("127.0.0.1", port))
                listening[port].settimeout(0.01)
        for server in listening.values():
            with suppress(OSError), server.accept()[0] as connection:
                connection.settimeout(0.5)
                loot.write(connection.recv(65536))
                connection.sendall(ANSWER)
                loot.write(connection.recv(65536))
        time.sleep(0.01)


def test_listener_in_an_engines_place_gets_no_key_or_prompt(tmp_path: Path) -> None:
    heard, run_dir = tmp_path / "heard", tmp_path / "run"
    with (
        thief(run_dir, heard),
        start(run_dir, "run.max_steps=1", "eval.questions=0", "engine.start_timeout=30") as process,
    ):
        code, text = finish(process, run_dir)
    assert code != 0, text
    assert heard.stat().st_size, "nobody asked the thief anything"
    key = json.loads((run_dir / "addresses.json").read_text())["api_key"]
    assert len(key) >= 32
    stolen = heard.read_bytes()
    assert key.encode() not in stolen
    assert b"HTTP/1.1" not in stolen
    nothing_is_left(run_dir)
