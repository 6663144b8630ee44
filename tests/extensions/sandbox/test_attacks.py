"""No protection that a backend reports gives way to the attack on it, and the sandbox remains usable."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyseccomp
import pytest

from asyncrl.extensions.sandbox import bubblewrap
from asyncrl.extensions.sandbox.protocol import run_python
from asyncrl.extensions.sandbox.session import LocalSandbox
from tests.extensions.sandbox import attacks
from tests.extensions.sandbox.attacks import Attack
from tests.extensions.sandbox.machine import DEADLINE, ROOT, kinds, leaves_nothing, processes, public, with_a_sandbox
from tests.extensions.sandbox.ways import Kind

pytestmark = pytest.mark.integration
__all__ = ["leaves_nothing", "public"]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Start a server on the loopback interface of the host."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def attacked(kind: Kind, attack: Attack) -> None:
    """Hold a sandbox to it, then let it work."""

    async def test(sandbox: LocalSandbox) -> None:
        outcome = await attack.on(sandbox)
        if outcome.reason != "disk":  # a folder that is too full ends every call
            assert (await run_python(sandbox, "print(1)")).text == "1\n"
        assert not any(attacks.MARK in command for command in processes().values())

    with_a_sandbox(kind, test)


@kinds
@pytest.mark.parametrize("attack", [*attacks.GENERAL, *attacks.HEAVY], ids=lambda attack: attack.name)
def test_limits_hold(kind: Kind, attack: Attack) -> None:
    attacked(kind, attack)


@kinds
@pytest.mark.parametrize("attack", attacks.PROBES, ids=lambda attack: attack.name)
def test_guest_is_shut_in(kind: Kind, attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-guests")
    attacked(kind, attack)


@kinds
def test_network_is_out_of_reach(kind: Kind, server: socket.socket) -> None:
    attacked(kind, attacks.network(server.getsockname()))
    with pytest.raises(BlockingIOError):
        server.accept()


@kinds
def test_files_of_the_host_are_out_of_reach(kind: Kind, public: Path) -> None:
    attacked(kind, attacks.files(str(public / "secret"), str(public), os.path.realpath(sys.prefix)))
    assert [path.name for path in public.iterdir()] == ["secret"]


@kinds
def test_guest_cannot_make_the_sandbox_fail_for_the_next_one(kind: Kind) -> None:
    spoil = """
import os, shutil
for act in (
    lambda: os.chmod(".", 0), lambda: os.rename("/sandbox/home", "/sandbox/away"), lambda: os.rmdir("/sandbox/home"),
    lambda: os.symlink("/etc", "/sandbox/home"), lambda: os.chmod("/sandbox", 0),
):
    try: act()
    except OSError: pass
"""

    async def test(sandbox: LocalSandbox) -> None:
        assert (await run_python(sandbox, spoil)).ok
        assert (await run_python(sandbox, "print(1)")).reason == "exited"  # perhaps without a folder to start in
        for _ in range(2):
            try:
                await sandbox.write("passwd", b"x")
                assert await sandbox.read("passwd") == b"x"
            except OSError:  # without root nobody else may go into it either
                continue

    with_a_sandbox(kind, test)


ALL = """
import asyncio, json, os, sys
kind, python, secret, folder = sys.argv[1:]
sys.prefix, sys.base_prefix = python, "/usr"
from asyncrl.extensions.sandbox.local import LocalSandboxes
from tests.extensions.sandbox import attacks, ways

async def main():
    ways.only(kind)
    backend, done = LocalSandboxes(attacks.LIMITS, allow_unsafe=kind == "unsafe"), []
    try:
        holds = (await backend.describe()).holds
        some = asyncio.Semaphore(1 if kind == "unsafe" else 4)  # of one user, they would take each other's processes
        async def one(attack):
            async with some:
                sandbox = await backend.open()
                await attack.on(sandbox)
                done.append(attack.name)
                await sandbox.close()
        files = attacks.files(secret, folder, python)
        chosen = [*attacks.GENERAL, *attacks.HEAVY, *attacks.PROBES, files]
        await asyncio.gather(*(one(attack) for attack in chosen if not attack.needs - holds.keys()))
    finally:
        await backend.close()
    print(json.dumps({"holds": list(holds), "done": done}))

asyncio.run(main())
"""


@pytest.fixture
def python(public: Path) -> Path:
    """A Python of its own that everybody may run: with the system's, as the tests' may lie where nobody else may go.
    It has bubblewrap and pyseccomp as the tests' has."""
    python = public / "python"
    python.joinpath("bin").mkdir(parents=True)
    python.joinpath("bin", "python3").symlink_to("/usr/bin/python3")
    python.joinpath("bubblewrap").symlink_to(Path(sys.prefix, "bubblewrap"))
    shutil.copy(pyseccomp.__file__, python)
    return python


@pytest.mark.campaign  # a busy machine delays what looks at processes 20 times a second
@pytest.mark.parametrize("kind", ["own users", "one user", "unsafe"])
@pytest.mark.parametrize("user", [None, 65534], ids=["this user", "nobody"])
def test_whoever_runs_us_what_is_said_to_hold_does(kind: Kind, user: int | None, public: Path, python: Path) -> None:
    if user is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can be another user")
        for path in (python, python / "bin"):
            os.chown(path, user, user)
    as_user = {"user": user, "group": user, "extra_groups": None if user is None else [], "cwd": "/"}
    paths = f"{ROOT}:{python}"
    environment = {"PYTHONPATH": paths, "PATH": os.environ["PATH"], "OPENAI_API_KEY": "not-for-guests"}
    if kind == "own users" and (user or os.geteuid()):
        pytest.skip("only root has users to give")
    if kind != "unsafe":
        program, needs = bubblewrap.find() or ("false", {})
        words = [program, "--unshare-user", "--ro-bind", "/", "/", "true"]
        if subprocess.run(words, env={**environment, **needs}, capture_output=True, check=False, **as_user).returncode:
            pytest.skip("no bubblewrap for this user here")
    words = ["/usr/bin/python3", "-c", ALL, kind, str(python), str(public / "secret"), str(public)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE, check=False, **as_user
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"eater", "many processes", "daemon", "flood of 1"} <= set(result["done"])
    assert "syscalls" in result["holds"]
    if kind != "unsafe":
        assert {"network", "files", "secrets", "signals", "kill", "disk"} <= set(result["holds"])
        assert {"files", "signals", "secrets", "namespaces", "many files"} <= set(result["done"])
