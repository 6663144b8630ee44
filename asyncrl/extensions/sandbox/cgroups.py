"""Control groups that bound the memory and the processes of a sandbox as a whole, and the cleanup after dead runs.

Version 1 has a hierarchy for each controller, version 2 has one for all. In version 2 a group that has processes cannot
have children with controllers, so a sibling of our group is tried too (a systemd user session, a scope with
Delegate=yes). The name of a group or folder identifies its owner, so that leftovers of a dead process can be removed:

    asyncrl-sandbox-NAMESPACE-PID-STARTED-NUMBER        STARTED: clock ticks after boot (field 22 of /proc/PID/stat)

The pid namespace is part of the name because containers may share folders.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "asyncrl-sandbox"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-\d+")


@dataclass(frozen=True)
class Marker:
    """Identity of a process that makes sandboxes."""

    namespace: int
    pid: int
    started: int

    @classmethod
    def mine(cls) -> Marker:
        """Return the marker of this process."""
        return cls(_namespace(), os.getpid(), started(os.getpid()))

    @classmethod
    def of(cls, name: str) -> Marker | None:
        """Return the owner that a name identifies; None if the name is not of this form."""
        match = _NAME.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

    def name(self, number: int) -> str:
        """Return the name for a sandbox of this process."""
        return f"{PREFIX}-{self.namespace}-{self.pid}-{self.started}-{number}"

    def alive(self) -> bool:
        """Return whether the process is running.

        A process of another namespace cannot be seen, and counts as running.
        """
        return self.namespace != _namespace() or started(self.pid) == self.started


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks after boot; -1 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


@dataclass(frozen=True)
class Bases:
    """Folders in which control groups can be created."""

    version_1: Mapping[str, Path] = field(default_factory=dict)  # by controller: memory, pids, cpuacct
    version_2: tuple[Path, ...] = ()  # in the order in which they are tried

    @property
    def all(self) -> set[Path]:
        """The folders of both versions."""
        return {*self.version_1.values(), *self.version_2}


def bases(process: Path = Path("/proc/self")) -> Bases:
    """Return the bases for a process, read from its mountinfo and cgroup files (proc(5), cgroups(7))."""
    mine: dict[str, str] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mine |= dict.fromkeys(controllers.split(","), path)
    version_1: dict[str, Path] = {}
    version_2: tuple[Path, ...] = ()
    for line in (process / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, target = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup":
            for name in {"memory", "pids", "cpuacct"} & mine.keys() & set(options.replace(",", " ").split()):
                if (folder := _below(target, root, mine[name])) is not None:
                    version_1[name] = folder
        elif kind == "cgroup2" and (folder := _below(target, root, mine.get("", "/"))) is not None:
            version_2 = (folder,) if folder == Path(target) else (folder, folder.parent)
    return Bases(version_1, version_2)


def _below(target: str, root: str, path: str) -> Path | None:
    """Return the folder of the group `path` in a hierarchy whose group `root` is mounted at `target`; None if
    outside."""
    relative = os.path.relpath(path, root)
    return None if relative.startswith("..") else Path(target, relative)


class ControlGroup:
    """The control groups of one sandbox. Its programs join them through the descriptors `joins`, which the worker
    inherits."""

    def __init__(self, bases: Bases, name: str, *, memory: int, processes: int) -> None:
        """Create groups with these bounds, in bytes and tasks. `bounds` names the bounds that are enforced here."""
        self._folders: list[Path] = []
        self.bounds: set[str] = set()
        self.joins: list[int] = []
        self.oom: int | None = None  # descriptors of files that the worker reads repeatedly
        self.cpu: int | None = None
        memory_1 = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
        for controller, base in bases.version_1.items():
            wanted = {"memory": memory_1, "pids": {"pids.max": processes}, "cpuacct": {}}[controller]
            self._make(base / name, {controller: wanted}, controller, oom="memory.oom_control", cpu="cpuacct.usage")
        for base in () if self.bounds & {"memory", "pids"} else bases.version_2:
            limits = {"memory": {"memory.max": memory, "memory.swap.max": 0}, "pids": {"pids.max": processes}}
            if self._make(base / name, limits, "memory", oom="memory.events", cpu="cpu.stat"):
                break

    def _make(self, folder: Path, limits: Mapping[str, Mapping[str, int]], needed: str, *, oom: str, cpu: str) -> bool:
        """Create a group unless the controller `needed` is missing. Return whether the group exists now."""
        opened: list[int] = []

        def open_file(name: str, flags: int) -> int:
            opened.append(os.open(folder / name, flags | os.O_CLOEXEC))
            return opened[-1]

        try:
            folder.mkdir()
            held = {name for name, values in limits.items() if all(_set(folder / f, v) for f, v in values.items())}
            if needed not in held:
                raise FileNotFoundError(needed)
            joins = open_file("cgroup.procs", os.O_WRONLY)
            self.oom = open_file(oom, os.O_RDONLY) if "memory" in held else self.oom
            self.cpu = open_file(cpu, os.O_RDONLY) if (folder / cpu).exists() else self.cpu
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            _removed(folder)
            return False
        self._folders.append(folder)
        self.joins.append(joins)
        self.bounds |= held & {"memory", "pids"}
        return True

    @property
    def descriptors(self) -> list[int]:
        """All open descriptors."""
        return [*self.joins, *(fd for fd in (self.oom, self.cpu) if fd is not None)]

    def release(self) -> None:
        """Close the descriptors. Workers have inherited copies of them."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.joins, self.oom, self.cpu = [], None, None

    def remove(self) -> bool:
        """Kill all processes in the groups and remove the groups. Return whether all groups are gone.

        Processes that were just killed may need a moment to end; call again then.
        """
        self._folders = [folder for folder in self._folders if not _removed(folder)]
        return not self._folders


def _set(file: Path, value: int) -> bool:
    """Write a bound. Return whether it is enforced. A missing swap file counts as enforced: the kernel has no swap."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "swap" in file.name or "memsw" in file.name
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
    return True


def _removed(folder: Path) -> bool:
    """Kill the processes in a group and remove the group. Return whether it is gone; killed processes take a moment."""
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            if pid != "0":  # a process of another pid namespace
                os.kill(int(pid), signal.SIGKILL)
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def sweep(bases: Bases) -> None:
    """Remove the groups and folders of dead processes, and kill the processes that still run in the groups."""
    temporary = Path(tempfile.gettempdir())
    for path in (path for parent in (*bases.all, temporary) for path in parent.glob(f"{PREFIX}-*")):
        marker = Marker.of(path.name)
        if marker and not marker.alive():
            if path.parent == temporary:
                shutil.rmtree(path, ignore_errors=True)
            elif not _removed(path):
                time.sleep(0.01)  # killed processes need a moment to end
                _removed(path)
