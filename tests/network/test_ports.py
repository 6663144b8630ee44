"""No port is assigned twice, whichever run asks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import AsyncRLError
from asyncrl.network import ports
from asyncrl.network.ports import LEASE_SECONDS, REPLICA_PORTS, free_block, free_port, free_ports

APART = 19000
"""The ports from here on are of no run. Tests of few ports divide them, because they may run at the same time."""
ASKS = "from asyncrl.network.ports import free_ports; print(*free_ports('127.0.0.1', 30))"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leases of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.usefixtures("temporary")
def test_processes_that_ask_at_once_are_given_different_ports() -> None:
    """The range is so small that they would collide."""
    asks = f"from asyncrl.network import ports; ports.FIRST_PORT, ports.LAST_PORT = {APART}, {APART} + 400; {ASKS}"
    running = [subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [port for one in running for port in one.communicate(timeout=60)[0].split()]
    assert (len(found), len(set(found))) == (120, 120)


def test_lease_that_is_too_old_is_given_again(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FIRST_PORT", APART + 400)
    monkeypatch.setattr(ports, "LAST_PORT", APART + 401)
    given = free_port("127.0.0.1")
    with pytest.raises(AsyncRLError, match="no free port"):
        free_port("127.0.0.1")
    (lease,) = temporary.glob("asyncrl-ports-*/*")
    long_ago = time.time() - LEASE_SECONDS - 1
    os.utime(lease, (long_ago, long_ago))
    assert free_port("127.0.0.1") == given
    with pytest.raises(AsyncRLError):
        free_port("127.0.0.1")


def strange(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize(
    "made", [strange, Path.touch, lambda path: path.symlink_to(path.parent / "elsewhere", target_is_directory=True)]
)
def test_folder_that_is_not_ours_alone_is_passed_over(made: Callable[[Path], None], temporary: Path) -> None:
    taken = temporary / f"asyncrl-ports-{os.getuid()}"
    made(taken)
    port = free_port("127.0.0.1")
    assert free_port("127.0.0.1") != port
    assert (temporary / f"{taken.name}-1" / str(port)).exists()
    assert taken.is_symlink() or taken.is_file() or not list(taken.iterdir())


@pytest.mark.usefixtures("temporary")
def test_no_folder_of_ours_is_an_error_in_words(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FOLDERS", 2)
    for name in ("", "-1"):
        (temporary / f"asyncrl-ports-{os.getuid()}{name}").touch()
    with pytest.raises(AsyncRLError, match="not private to this user: remove them, or set TMPDIR"):
        free_port("127.0.0.1")


@pytest.mark.usefixtures("temporary")
def test_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(AsyncRLError, match=r"cluster\.host"):
        free_ports("192.0.2.1", 1)


@pytest.mark.usefixtures("temporary")
def test_block_of_ports_is_leased_whole_and_avoids_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FIRST_PORT", APART + 500)
    monkeypatch.setattr(ports, "LAST_PORT", APART + 512)
    first = free_block("127.0.0.1", 4)
    others = {free_port("127.0.0.1") for _ in range(3)}
    assert not others & set(range(first, first + 4))


def test_ports_of_replicas_are_those_sglang_derives() -> None:
    distribution = importlib.metadata.distribution("sglang")
    source = Path(str(distribution.locate_file("sglang/srt/server_args.py"))).read_text()
    (handshake,) = re.findall(r"^DP_ATTENTION_HANDSHAKE_PORT_DELTA = (\d+)$", source, re.MULTILINE)
    (others,) = re.findall(r"NUM_DERIVED_PORTS = (\d+) if not", source)
    assert max(int(handshake), int(others)) + 1 == REPLICA_PORTS
