"""Control groups: what bounds the memory of all processes of a sandbox together, where this process may make one.

Version 1 has a hierarchy for each controller, version 2 one for all. In version 2 a group with processes cannot have
children with controllers, so where ours cannot, a sibling is tried (a systemd user session, a scope with Delegate=yes).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.envs.sandbox.leftovers import Marker


@dataclass(frozen=True)
class Bases:
    """Folders in which groups may be made."""

    version_1: Mapping[str, Path] = field(default_factory=dict)  # by controller: memory, pids, cpuacct
    version_2: tuple[Path, ...] = ()  # to be tried in this order


def bases(process: Path = Path("/proc/self")) -> Bases:
    """Of this process, from its mountinfo and cgroup (proc(5), cgroups(7))."""
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
    """Where a group is seen whose path is this, in a hierarchy mounted from its group `root`."""
    relative = os.path.relpath(path, root)
    return None if relative.startswith("..") else Path(target, relative)


class ControlGroup:
    """One sandbox's; commands join it through `joins`, which the supervisor inherits."""

    def __init__(self, bases: Bases, name: str, *, memory: int, processes: int) -> None:
        """Bounds in bytes and tasks. What cannot be bounded is left out: see `bounds`."""
        self._folders: list[Path] = []
        self.bounds: set[str] = set()
        self.joins: list[int] = []
        self.oom: int | None = None  # to be read again and again
        self.cpu: int | None = None
        for controller, base in bases.version_1.items():
            wanted = {
                "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
                "pids": {"pids.max": processes},
                "cpuacct": {},
            }[controller]
            self._make(base / name, {controller: wanted}, controller, oom="memory.oom_control", cpu="cpuacct.usage")
        for base in () if self.bounds & {"memory", "pids"} else bases.version_2:
            limits = {"memory": {"memory.max": memory, "memory.swap.max": 0}, "pids": {"pids.max": processes}}
            if self._make(base / name, limits, "memory", oom="memory.events", cpu="cpu.stat"):
                break

    def _make(self, folder: Path, limits: Mapping[str, Mapping[str, int]], needed: str, *, oom: str, cpu: str) -> bool:
        """Whether there is such a group now; not without the controller that is needed."""
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
        """All that are open."""
        return [*self.joins, *(fd for fd in (self.oom, self.cpu) if fd is not None)]

    def release(self) -> None:
        """Close the descriptors; who joined or inherited keeps them."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.joins, self.oom, self.cpu = [], None, None

    def remove(self) -> bool:
        """Whether nothing is left of it; its processes are dead."""
        self._folders = [folder for folder in self._folders if not _removed(folder)]
        return not self._folders


def _set(file: Path, value: int) -> bool:
    """Whether a bound holds: swap cannot be bounded, and need not be, where the kernel has none."""
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
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def ooms(descriptor: int) -> int:
    """How often the kernel killed a process of the group for its memory."""
    return _entry(os.pread(descriptor, 4096, 0), b"oom_kill")


def cpu_seconds(descriptor: int) -> float:
    """CPU time that the group's processes have used, also those that have ended."""
    text = os.pread(descriptor, 4096, 0)
    return _entry(text, b"usage_usec") / 1e6 if b"usage_usec" in text else int(text) / 1e9


def _entry(text: bytes, name: bytes) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == name), 0)


def sweep(bases: Bases) -> None:
    """Remove the groups that dead processes made, and what still runs in them."""
    folders: Iterable[Path] = {*bases.version_1.values(), *bases.version_2}
    for folder in folders:
        with suppress(OSError):
            for child in folder.iterdir():
                marker = Marker.of(child.name)
                if marker and not marker.alive():
                    _empty(child)


def _empty(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    _removed(folder)
