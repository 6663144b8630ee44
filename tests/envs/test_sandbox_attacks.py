"""No protection that a backend says it has gives way to the attack on it, and the sandbox serves on afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.envs.sandbox.local import Kind
from asyncrl.envs.sandbox.protocol import run_python
from asyncrl.envs.sandbox.session import LocalSandbox
from tests.envs import attacks
from tests.envs.attacks import Attack
from tests.envs.machine import DEADLINE, ROOT, kinds, leaves_nothing, processes, with_a_sandbox

pytestmark = pytest.mark.integration
__all__ = ["leaves_nothing"]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """On the loopback of the host."""
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
def test_files_of_the_host_are_out_of_reach(kind: Kind, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not-for-guests")
    for path in (secret, tmp_path):  # readable and writable, if only it could be seen
        path.chmod(0o777)
    attacked(kind, attacks.files(str(secret), str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


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


PLAIN = """
import asyncio, json, os, sys
sys.prefix = sys.base_prefix = "/usr"
from asyncrl.envs.sandbox.local import LocalSandboxes
from tests.envs import attacks

async def main(kind):
    backend = LocalSandboxes(attacks.LIMITS, kinds=[kind])
    result = {"done": []}
    try:
        protections = await backend.describe()
        result["holds"] = list(protections.holds)
        some = asyncio.Semaphore(4)
        async def one(attack):
            async with some:
                sandbox = await backend.open()
                await attack.on(sandbox)
                result["done"].append(attack.name)
                await sandbox.close()
        chosen = [*attacks.GENERAL, *attacks.HEAVY, *attacks.PROBES, attacks.files(sys.argv[2], sys.argv[3])]
        await asyncio.gather(*(one(attack) for attack in chosen if not attack.needs - protections.holds.keys()))
    except Exception as error:
        result["error"] = repr(error)
    finally:
        await backend.close()
    print(json.dumps(result))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["namespaces", "bubblewrap", "processes"])
@pytest.mark.parametrize("user", [None, 65534], ids=["this user", "nobody"])
def test_whoever_runs_us_what_is_said_to_hold_does(kind: Kind, user: int | None, tmp_path: Path) -> None:
    """With a Python that everybody may run: the system's."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    secret = tmp_path / "secret"
    secret.write_text("not-for-guests")
    words = ["/usr/bin/python3", "-c", PLAIN, kind, str(secret), str(tmp_path)]
    done = subprocess.run(
        words,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OPENAI_API_KEY": "not-for-guests"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if "no mechanism works here" in result.get("error", ""):
        pytest.skip(result["error"])
    assert "error" not in result, (result, done.stderr)
    assert {"eater", "fork bomb", "daemon", "flood of 1", "many files"} <= set(result["done"])
    if kind != "processes":
        assert {"network", "files", "secrets", "signals", "kill", "disk"} <= set(result["holds"])
        assert {"files", "signals", "secrets", "namespaces"} <= set(result["done"])


assert sys.platform == "linux"
assert asyncio.run
