"""Whoever dies, and whenever, nothing of a sandbox is left: no process, no folder, no control group, no mount."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox.cgroups import Marker
from asyncrl.extensions.sandbox.protocol import run_python
from asyncrl.launch import leftovers
from tests.extensions.sandbox.attacks import DAEMON, FORK_BOMB, MARK, STUBBORN
from tests.extensions.sandbox.machine import (
    DEADLINE,
    ROOT,
    backend,
    kinds,
    leaves_nothing,
    left,
    named,
    processes,
    until,
    wait_until,
)
from tests.extensions.sandbox.ways import Kind

pytestmark = pytest.mark.integration
__all__ = ["leaves_nothing"]

OWNER = f"""
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores it
if sys.argv[1] == "unsafe":
    sys.prefix = sys.base_prefix = "/usr"
from asyncrl.extensions.sandbox.local import LocalSandboxes
from asyncrl.extensions.sandbox.protocol import Limits
from tests.extensions.sandbox import attacks, ways
ways.only(sys.argv[1])
sys.argv.append({MARK!r})

async def main():
    sandboxes = LocalSandboxes(Limits(seconds=600.0), warm=1, allow_unsafe=sys.argv[1] == "unsafe")
    for attack in (attacks.STUBBORN, attacks.FORK_BOMB, attacks.STUBBORN):
        sandbox = await sandboxes.open()
        asyncio.ensure_future(sandbox.run(["python3", "-c", attack.source, {MARK!r}]))
    await (await sandboxes.open()).write("a", b"x" * 1000000)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def stubborn(owner: int) -> list[int]:
    """Programs that run until they are killed; the fork bomb may end at a limit."""
    return [pid for pid, command in processes(owner).items() if MARK in command and STUBBORN.source in command]


@contextmanager
def owner(kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process with sandboxes in which programs run."""
    words = [sys.executable, "-c", OWNER, kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        try:
            assert run.stdout
            if not run.stdout.readline():
                pytest.skip(f"{kind} does not work here")
            wait_until(lambda: len(stubborn(run.pid)) == 2)
            yield run
        finally:
            run.kill()


@pytest.mark.parametrize("kind", ["own users", "one user", "unsafe"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_owner_leaves_no_process_and_no_rest(kind: Kind, number: signal.Signals) -> None:
    with owner(kind) as run:
        known = [psutil.Process(pid) for pid in processes(run.pid)]
        run.send_signal(number)
        run.wait(DEADLINE)
        assert psutil.wait_procs(known, DEADLINE)[1] == []
    start_and_stop("unsafe")
    assert left(run.pid) == []


@pytest.mark.parametrize("kind", ["own users", "one user"])
def test_owner_and_workers_killed_together_leave_no_process(kind: Kind) -> None:
    """Whichever of owner, bubblewrap and worker dies first."""
    with owner(kind) as run:
        everybody = processes(run.pid)
        known = [psutil.Process(pid) for pid in everybody]
        os.kill(run.pid, signal.SIGSTOP)  # it notices nothing
        for pid in [pid for pid, command in everybody.items() if "bwrap" in command.split()[0] and pid % 2]:
            os.kill(pid, signal.SIGKILL)
        run.kill()
        assert psutil.wait_procs(known, DEADLINE)[1] == []
    start_and_stop("unsafe")
    assert left(run.pid) == []


def start_and_stop(kind: Kind) -> None:
    """A next backend, which may find that it can do nothing here."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind) as opened:
            with suppress(EpisodeFailed):
                await opened.describe()

    asyncio.run(main())


def test_folder_of_a_dead_owner_goes_and_of_a_living_stays() -> None:
    mine = Marker.mine()
    folders = [Path(tempfile.gettempdir(), marker.name(1)) for marker in (mine, Marker(mine.namespace, mine.pid, 1))]
    for folder in folders:
        folder.joinpath("home").mkdir(parents=True)
    try:
        start_and_stop("unsafe")
        assert [folder.exists() for folder in folders] == [True, False]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@kinds
@pytest.mark.parametrize("who", ["worker", "bubblewrap"])
def test_killed_worker_fails_its_own_and_the_backend_lives(kind: Kind, who: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind, warm=1) as opened:
            sandbox = await opened.open()
            await until(lambda: len(opened._ready) == 1)
            (warm,) = opened._ready
            running = asyncio.ensure_future(sandbox.run(["sh", "-c", "sleep 60", MARK]))
            await until(lambda: any(MARK in text for text in processes().values()))
            known = [psutil.Process(pid) for pid in processes()]
            outer = {pid for pid in processes() if ppid(pid) == os.getpid()}
            inner = {pid for pid in processes() if ppid(pid) in outer}
            for pid in outer if who == "bubblewrap" else inner:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with pytest.raises(EpisodeFailed, match="sandbox: "):
                await running
            # the event loop may learn of the warm worker's end a moment after the kernel
            await until(lambda: not any(lives(process) for process in known) and not warm.usable)
            assert (await run_python(await opened.open(), "print(1)")).text == "1\n"
            await sandbox.close()

    asyncio.run(main())


def ppid(pid: int) -> int:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).ppid()
    return 0


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@kinds
def test_nothing_of_the_run_is_in_the_processes_around_a_guest(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-guests")

    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind) as opened:
            sandboxes = [await opened.open() for _ in range(3)]
            for sandbox in sandboxes:
                await sandbox.write("a", b"")  # it has closed by now what it did not need
            assert len(processes()) == 6  # of each, bubblewrap and the worker
            for pid in processes():
                with suppress(PermissionError):  # only root sees this of a worker
                    assert b"not-for-guests" not in environment(pid)
                    assert len([end for end in ends(pid) if end.startswith("socket:")]) <= 1

    asyncio.run(main())


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def ends(pid: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


@kinds
def test_sandbox_closed_in_the_middle_leaves_nothing(kind: Kind) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind) as opened:
            for attack in (STUBBORN, FORK_BOMB, DAEMON):
                sandbox = await opened.open()
                running = asyncio.ensure_future(sandbox.run(["python3", "-c", attack.source, MARK]))
                await until(lambda done=running.done: done() or any(MARK in text for text in processes().values()))
                await sandbox.close()
                assert not any(MARK in text for text in processes().values())
                assert list(named({os.getpid()})) == []
                with suppress(EpisodeFailed):
                    await running

    asyncio.run(main())


@kinds
def test_opening_that_is_cancelled_at_any_moment_leaves_nothing(kind: Kind) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind) as opened:
            await opened.describe()
            kept = await opened.open()
            for number in range(20):
                opening = asyncio.ensure_future(opened.open())
                for _ in range(number):
                    await asyncio.sleep(0)
                if number >= 10:
                    await asyncio.sleep(0.001 * (number - 10))
                opening.cancel()
                with suppress(asyncio.CancelledError):
                    await (await opening).close()
            await until(lambda: len(processes()) == 2)
            assert (await kept.run(["true"])).ok

    asyncio.run(main())


@kinds
def test_backend_whose_start_is_cancelled_leaves_nothing(kind: Kind) -> None:
    async def main() -> None:
        for number in range(12):
            async with asyncio.timeout(DEADLINE), backend(kind) as opened:
                opening = asyncio.ensure_future(opened.open())
                await asyncio.sleep(0.01 * number)
                opening.cancel()
                with suppress(asyncio.CancelledError):
                    await opening
            assert left() == []

    asyncio.run(main())


def test_folders_of_dead_owners_go_at_the_end_of_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Marker.mine()
    alive, dead = [tmp_path / marker.name(1) for marker in (mine, replace(mine, started=1))]
    for folder in (alive, dead):
        folder.mkdir()
    leftovers.sweep("any-run", [])
    assert (alive.exists(), dead.exists()) == (True, False)
    alive.rmdir()
