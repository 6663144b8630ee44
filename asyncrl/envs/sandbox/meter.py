"""What the processes of a call use together, looked at every TICK_SECONDS: the limits that no rlimit holds.

With a control group the kernel counts, and kills for memory itself; without one the processes in /proc are added up.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.envs.sandbox import cgroups

TICK_SECONDS = 0.05
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
BYTES_PER_FILE = 4096
"""Of disk_mb: so many bytes for each file that may be, as files without content fill a disk too."""
_DISK_SHARE = 0.1
"""Looking through a folder takes at most this share of the time."""


@dataclass(frozen=True)
class Bounds:
    """What a meter ends a call for; None for what the kernel bounds."""

    cpu_seconds: float
    memory: int | None  # bytes
    processes: int | None
    disk: int  # bytes


class Meter:
    """Of one call."""

    def __init__(
        self,
        bounds: Bounds,
        processes: Callable[[], Iterable[int]],
        folder: str | None,
        oom: int | None,
        cpu: int | None,
    ) -> None:
        """`folder`: to be kept within bounds; `oom` and `cpu`: descriptors of a control group (cgroups.py)."""
        self._bounds, self._processes, self._folder = bounds, processes, folder
        self._oom, self._cpu = oom, cpu
        self._ooms = cgroups.ooms(oom) if oom is not None else 0
        self._cpu_before = cgroups.cpu_seconds(cpu) if cpu is not None else 0.0
        self._next_disk = 0.0

    def broken(self) -> str | None:
        """The limit that is broken now."""
        if self.out_of_memory():
            return "memory"
        if self._cpu is not None and cgroups.cpu_seconds(self._cpu) - self._cpu_before > self._bounds.cpu_seconds:
            return "cpu"
        if self._cpu is None or self._bounds.memory is not None or self._bounds.processes is not None:
            living = list(self._processes())
            if self._bounds.processes is not None and len(living) > self._bounds.processes:
                return "processes"
            if self._cpu is None and sum(map(_cpu_seconds, living)) > self._bounds.cpu_seconds:
                return "cpu"
            if self._bounds.memory is not None and _memory(living, self._bounds.memory) > self._bounds.memory:
                return "memory"
        return "disk" if self._disk_is_full() else None

    def out_of_memory(self) -> bool:
        """Whether the kernel killed for memory since the call began."""
        return self._oom is not None and cgroups.ooms(self._oom) > self._ooms

    def _disk_is_full(self) -> bool:
        began = time.monotonic()
        if self._folder is None or began < self._next_disk:
            return False
        full = _disk(self._folder, self._bounds.disk) > self._bounds.disk
        ended = time.monotonic()
        self._next_disk = ended + (ended - began) / _DISK_SHARE
        return full


def _memory(pids: Sequence[int], most: int) -> int:
    """Resident bytes. What processes share is counted once where the sum says too much (proportional set size)."""
    resident = {pid: int(_read(pid, "statm", "0 0").split()[1]) * _PAGE for pid in pids}
    if sum(resident.values()) <= most:
        return sum(resident.values())
    total = 0
    for pid in pids:
        lines = _read(pid, "smaps_rollup", "").splitlines()
        shares = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
        total += shares[0] if shares else resident[pid]
    return total


def _cpu_seconds(pid: int) -> float:
    """Of a process and of its children that have ended."""
    fields = _read(pid, "stat", "").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _read(pid: int, file: str, absent: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:  # it has ended, or hides
        return absent


def _disk(folder: str, most: int) -> int:
    """Bytes below a folder, or enough of them to be too many. Mounts inside it are not counted: Python may be one."""
    total, left, device = 0, [folder], _device(folder)
    while left and total <= most:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_dev != device:
                        continue
                    total += BYTES_PER_FILE + status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        left.append(entry.path)
        except OSError:  # removed meanwhile
            continue
    return total


def _device(folder: str) -> int:
    try:
        return os.stat(folder).st_dev
    except OSError:  # removed
        return 0
