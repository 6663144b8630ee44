"""Cleanup after killed processes: their children, shared-memory files and temporary files.

The launcher does this at the end of its run. If the launcher itself was killed, the next launcher on this machine does
it, for whichever run: it finds the folder of the dead launcher (Scratch), whose lock is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from asyncrl import jsonl
from asyncrl.models.catalog import cache_dir
from asyncrl.network.ports import HOST_TMPDIR

SHARED = Path("/dev/shm")
OURS = ("torch_", "sglang_loads_", "sgl_shm_mq_", "sem.mp-", "psm_", "nccl-")
"""Name prefixes of the files that torch, SGLang, multiprocessing and NCCL create; all other mapped files are left
alone."""
_PID = re.compile(r"_(\d+)_")
PREFIX = "asyncrl-run-"
OWNER, NOTED = "owner", "shared.json"
START_NOTE_SECONDS, NOTE_SECONDS = 2.0, 60.0
"""Seconds between two scans of the mapped files: more frequent while processes start, because that is when they map."""
STARTING_SECONDS = 120.0
"""Seconds for which a process counts as starting."""
KILL_SECONDS = 2.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send the calling process this signal when its parent dies. Called in a child before its program
    begins. (An srun must get SIGTERM: a killed srun leaves its step running.)"""
    _libc.prctl(PR_SET_PDEATHSIG, number)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _members(leaders: Iterable[int]) -> set[int]:
    """Return the living processes of these groups."""
    groups, found = set(leaders), set[int]()
    for pid in _processes():
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) in groups:
                found.add(pid)
    return found


def _left_by(pids: set[int]) -> set[Path]:
    """Return the shared-memory files with the pid of one of these processes in their names. One that was killed while
    it filled a file, for lack of room, was perhaps never seen to map it."""
    named = ((SHARED / name, _PID.search(name)) for name in os.listdir(SHARED) if name.startswith(OURS))
    return {file for file, found in named if found and int(found[1]) in pids}


def _mapped(pid: int) -> set[Path]:
    """Return the shared-memory files that a process has mapped, or nothing if it has ended or is another user's."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = (line.partition(f" {SHARED}/")[2] for line in lines)
    return {SHARED / name for name in names if name.startswith(OURS) and not name.endswith("(deleted)")}


def sweep(value: str, files: Iterable[Path], variable: str = "ASYNCRL_RUN_ID") -> None:
    """Kill the processes that left their process group but carry the run's id, or another mark, in their environment;
    remove these files, and what extensions find of dead owners. (torch's shared-memory manager would remove its files
    too, but wait two seconds for other clients.)

    A file that a living process maps stays: engines that join a run map the memory in which its trainer sends weights.
    """
    mark = f"{variable}={value}".encode()
    for pid in carrying(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while carrying(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    if unused := set(files):
        unused = unused.difference(*map(_mapped, _processes()))
    for file in unused:
        file.unlink(missing_ok=True)
    from asyncrl import lookup  # imports pydantic, which a task of Slurm does not wait for

    lookup.sweep()


def _processes() -> Iterable[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def carrying(mark: bytes) -> list[int]:
    """Return the living processes, other than this one, whose environment contains the mark."""
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


class Scratch:
    """The folder for the temporary files of a run on this machine, set as TMPDIR of its processes. It also records
    their shared-memory files, so that the next launcher can remove them if this one is killed."""

    def __init__(
        self, value: str, variable: str = "ASYNCRL_RUN_ID", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the folder, and remove what killed launchers have left. The model's code may run as another user, who
        can enter the folder by its name but cannot list it."""
        remove_abandoned()
        self._mark = {"variable": variable, "value": value}
        self._clock = clock
        self._noted: set[Path] = set()
        self._members: set[int] = set()
        self._started_at = self._noted_at = clock()
        made = Path(tempfile.mkdtemp(prefix=".asyncrl-new-"))
        self._held = os.open(made / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX)  # held until this process dies, however it dies
        jsonl.replace(made / NOTED, {**self._mark, "files": []})
        made.chmod(0o711)
        self.path = made.rename(made.with_name(PREFIX + made.name.removeprefix(".asyncrl-new-")))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables for the processes. Caches that outlive a run stay outside of this folder."""
        return {
            "TMPDIR": str(self.path),
            HOST_TMPDIR: os.environ.get(HOST_TMPDIR) or tempfile.gettempdir(),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_dir() / "torchinductor"),
        }

    def starts(self) -> None:
        """Scan frequently for a while, because a process is being started."""
        self._started_at = self._clock()

    def note(self, leaders: Iterable[int]) -> None:
        """Record the shared-memory files that the processes of these groups have mapped, if a scan is due."""
        now = self._clock()
        wait = START_NOTE_SECONDS if now - self._started_at < STARTING_SECONDS else NOTE_SECONDS
        if now - self._noted_at < wait:
            return
        self._noted_at = now
        before = len(self._noted)
        self.see(leaders)
        if len(self._noted) > before:
            with contextlib.suppress(OSError):  # full disk; the record only matters if this process is killed
                jsonl.replace(self.path / NOTED, {**self._mark, "files": sorted(map(str, self._noted))})

    def see(self, leaders: Iterable[int]) -> None:
        """Scan the files that these groups have mapped now. Must be called before they are stopped, which a scan that
        fails must not prevent: there may be too many open files."""
        with contextlib.suppress(OSError):
            members = _members(leaders)
            self._members |= members
            self._noted = self._noted.union(*map(_mapped, members))

    def remove(self) -> None:
        """Remove the folder and the shared-memory files, once all processes are stopped."""
        try:
            sweep(self._mark["value"], self._noted | _left_by(self._members), self._mark["variable"])
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)


def remove_abandoned() -> None:
    """Remove what killed launchers of this user have left: processes, shared memory and folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another process is removing it
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    held = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
        with contextlib.suppress(ValueError, KeyError):  # the owner was killed while it wrote
            told = json.loads((folder / NOTED).read_text())
            files = [Path(file) for file in told["files"]]
            ours = [file for file in files if file.parent == SHARED and file.name.startswith(OURS)]
            sweep(told["value"], ours, told["variable"])
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)
