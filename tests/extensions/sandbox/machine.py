"""Leftovers of sandboxes on the machine, the kinds that it supports, and the backends for tests of real ones."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from asyncrl.extensions.sandbox import bubblewrap, cgroups, local
from asyncrl.extensions.sandbox.cgroups import PREFIX
from asyncrl.extensions.sandbox.local import LocalSandboxes
from asyncrl.extensions.sandbox.program import Settings
from asyncrl.extensions.sandbox.protocol import Limits
from asyncrl.extensions.sandbox.session import LocalSandbox
from tests.extensions.sandbox.attacks import LIMITS, MARK
from tests.extensions.sandbox.ways import Kind, only

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 60.0
"""Seconds of any wait of these tests, on a machine where others work too."""
needs_bubblewrap = pytest.mark.skipif(bubblewrap.find() is None, reason="no bubblewrap here: `make bubblewrap`")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
_python = Path(os.path.realpath(sys.executable))
_for_all = os.geteuid() != 0 or all(path.stat().st_mode & 1 for path in (_python, *_python.parents))
needs_readable_python = pytest.mark.skipif(not _for_all, reason="the Python of the tests is for root's eyes only")
KINDS: list[Kind] = [*(["own users"] if os.geteuid() == 0 else []), *(["one user"] if _for_all else [])]
"""Those that there can be for this user, with bubblewrap."""
_isolated = [
    pytest.param("own users", marks=[needs_bubblewrap, needs_root]),
    pytest.param("one user", marks=[needs_bubblewrap, needs_readable_python]),
]
kinds = pytest.mark.parametrize("kind", _isolated)
kinds_with_users = pytest.mark.parametrize(
    "kind", [*_isolated, pytest.param("unsafe", marks=[needs_root, needs_readable_python])]
)
"""Those in which one program cannot reach another."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Any:
    """Whatever a test does, its sandboxes leave no process, folder, control group or mount."""
    before = mounts()
    yield
    wait_until(lambda: left() == [])
    assert mounts() == before


def mounts() -> list[str]:
    """Return the mounts of this process, without the networks that other tests create meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/netns" not in line]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder of the host that everybody may read and write, with a `secret` in it."""
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-test-"))
    folder.joinpath("secret").write_text("not-for-guests")
    for path in (folder, folder / "secret"):
        path.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def left(owner: int | None = None) -> list[str]:
    """Return the processes, folders and control groups that belong to the sandboxes of this process, and the folders
    and groups of another owner. Other runs of this machine may have theirs."""
    groups = list(named({os.getpid(), *([owner] if owner else [])}))
    return [*map(str, groups), *(f"{pid}: {command}" for pid, command in processes().items())]


def named(owners: Collection[int]) -> Iterator[Path]:
    """Yield the folders and control groups whose names carry one of these pids."""
    for parent in (Path(tempfile.gettempdir()), *cgroups.bases().all):
        for path in parent.glob(f"{PREFIX}-*"):
            if (marker := cgroups.Marker.of(path.name)) and marker.pid in owners:
                yield path


def processes(owner: int | None = None) -> dict[int, str]:
    """Command lines of living workers, bubblewraps and marked programs of this test session, by pid; or those below
    `owner`."""
    root, parents, found = owner or os.getpid(), {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = folder.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()
            command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parents[int(folder.name)] = int(fields[1])
            if fields[0] not in "ZX" and ("asyncrl.extensions.sandbox" in command or MARK in command):
                found[int(folder.name)] = command

    def below(pid: int) -> bool:
        while pid not in (0, 1, root):
            pid = parents.get(pid, 0)
        return pid == root

    return {pid: command for pid, command in found.items() if below(pid)}


async def until(happened: Callable[[], bool]) -> None:
    """Look again and again: nothing tells."""
    async with asyncio.timeout(DEADLINE):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < deadline, left()
        time.sleep(0.01)


@asynccontextmanager
async def backend(kind: Kind, limits: Limits = LIMITS, **more: Any) -> AsyncIterator[LocalSandboxes]:
    """One that is closed afterwards."""
    with patch.object(local, "ways"):
        only(kind)
        backend = LocalSandboxes(limits, allow_unsafe=kind == "unsafe", **more)
        try:
            yield backend
        finally:
            await backend.close()


def with_a_sandbox(
    kind: Kind, test: Callable[[LocalSandbox], Awaitable[None]], limits: Limits = LIMITS, **more: Any
) -> None:
    """Run a test of one."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind, limits, **more) as opened:
            await test(await opened.open())

    asyncio.run(main())


def sources(paths: Sequence[str] = ()) -> dict[str, str]:
    """An environment for a Python that starts beside this one."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}


assert sys.platform == "linux"


def settings(**more: Any) -> Settings:
    """Return settings of the program that runs in a sandbox."""
    limits = {"cpu_seconds": 5.0, "processes": 32, "file_mb": 1, "memory_mb": 512, "output_kb": 1, "disk_mb": 1}
    plain = {"limits": limits, "uid": None, "folder": "/", "environment": {"PATH": "/usr/bin:/bin"}, "alone": False}
    rest = {"rlimit_memory": False, "rlimit_processes": False, "joins": [], "owner": -1, "oom": None, "cpu": None}
    return Settings(**{**plain, **rest, **more})
