"""What processes that are stopped at once would leave behind: their children, others of the run, and files in shared
memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SHARED = Path("/dev/shm")
OURS = ("torch_", "sglang_loads_", "sgl_shm_mq_", "sem.mp-")
"""Files that torch, SGLang and multiprocessing make for themselves; whatever else is mapped belongs to somebody."""
KILL_SECONDS = 2.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child, before its program begins: the kernel sends it this when who started it dies. (An srun must get
    SIGTERM: one that is killed leaves its step running.)"""
    _libc.prctl(PR_SET_PDEATHSIG, number)


def shared_files(leaders: Iterable[int]) -> set[Path]:
    """Files in shared memory that the living processes of these groups have mapped and would have to remove."""
    groups, found = set(leaders), set()
    for pid in _processes():
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to read
            if os.getpgid(pid) in groups:
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    name = line.partition(f" {SHARED}/")[2]
                    if name.startswith(OURS) and not name.endswith("(deleted)"):
                        found.add(SHARED / name)
    return found


def sweep(value: str, files: Iterable[Path], variable: str = "ASYNCRL_RUN_ID") -> None:
    """Kill what left its process group but carries the run's id, or another mark, in its environment (torch's
    shared-memory manager does, and would wait two seconds for other clients), and remove these files."""
    mark = f"{variable}={value}".encode()
    for pid in carrying(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while carrying(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    for file in files:
        file.unlink(missing_ok=True)


def _processes() -> Iterable[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def carrying(mark: bytes) -> list[int]:
    """Living processes, other than this one, whose environment holds the mark."""
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found
