"""Programs in a sandbox: sets their limits, starts them, and kills them together with all processes they started.

This module is part of the worker (worker.py). It runs inside the sandbox and imports only the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import resource
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

MIB = 1024 * 1024
WRITABLE = "/sandbox"
"""Folder in which programs may write, in a sandbox made by bubblewrap."""
FILES = 512
"""Limit of open files per process (RLIMIT_NOFILE)."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_ABOVE = 32
"""First descriptor for files that the program must not inherit. Lower numbers belong to the program."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def prctl(option: int, value: int, address: int = 0) -> None:
    """Call prctl(2), which Python does not have. Raises OSError."""
    if _libc.prctl(option, value, address, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


class _Filter(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(descriptor: int) -> None:
    """Install the system-call filter read from a file, permanently for this process and its descendants.

    Raises OSError.
    """
    with open(descriptor, "rb") as file:
        code = file.read()
    filter_ = _Filter(len(code) // 8, code)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(filter_))


class Settings(NamedTuple):
    """Settings of a worker, which it receives from its owner as JSON.

    This is a NamedTuple because importing `dataclasses` would take longer than the rest of the worker's start.
    """

    limits: dict[str, Any]  # the fields of protocol.Limits
    environment: dict[str, str]  # environment of programs
    folder: str  # working directory of programs
    uid: int | None  # uid and gid of programs; None: those of the worker
    alone: bool  # whether the worker is process 1 of a pid namespace, and the folder on a tmpfs
    rlimit_memory: bool  # whether to bound the memory of each process, because no group bounds their sum
    rlimit_processes: bool  # whether to bound their number; False if the kernel counts other sandboxes too
    owner: int  # descriptor of the stream socket to the owner
    joins: Sequence[int]  # descriptors through which programs join the control groups
    oom: int | None  # descriptor of the group's file that counts kills for memory
    cpu: int | None  # descriptor of the group's file of CPU time
    asks: int | None = None  # socket over which programs have others started in the sandbox beside theirs
    serves: int | None = None  # other end of that socket, for the worker of the sandbox beside it
    filter: int | None = None  # descriptor of a system-call filter that bubblewrap has not installed

    @property
    def descriptors(self) -> set[int]:
        """Descriptors that the worker inherits."""
        own = {self.owner, self.oom, self.cpu, self.asks, self.serves, self.filter, *self.joins}
        return {descriptor for descriptor in own if descriptor is not None}


def become(
    settings: Settings, home: int, command: Sequence[str], env: dict[str, str], ends: Sequence[int], fault: int
) -> NoReturn:
    """Run the command in this process, which was just forked, with `ends` as its descriptors 0, 1, 2, ...

    A failed setup is written to `fault`. A command that cannot be run is reported on stderr, as by a shell; so is
    damage that an earlier program can have caused (to its folder, or to the memory of its control group).
    """
    confined = False
    try:
        above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for end in (fault, home, *settings.joins, *ends)]
        fault, home, joins, ends = above[0], above[1], above[2 : -len(ends)], above[-len(ends) :]
        os.setsid()
        for place, end in enumerate(ends):
            os.dup2(end, place)
        _confine(settings, joins)
        confined = True
        if settings.uid is not None:
            os.setgroups([])
            os.setresgid(settings.uid, settings.uid, settings.uid)
            os.setresuid(settings.uid, settings.uid, settings.uid)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.fchdir(home)
        os.execvpe(command[0], list(command), {**settings.environment, **env})
    except (OSError, ValueError) as error:
        if not confined:
            os.write(fault, str(error).encode(errors="replace"))
            os._exit(1)
        os.write(2, f"{command[0]}: {getattr(error, 'strerror', None) or error}\n".encode(errors="surrogateescape"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    finally:  # an unexpected error: the child must not return into the worker's code
        os.write(fault, traceback.format_exc().encode(errors="replace"))
        os._exit(1)


def _confine(settings: Settings, joins: Sequence[int]) -> None:
    prctl(PR_SET_DUMPABLE, 1)  # without it a process may not write its own files in /proc
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # the OOM killer takes these first
        file.write("1000")
    os.umask(0o022)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    limits, most = settings.limits, settings.limits["processes"]
    if settings.uid is None:  # other processes have the same uid
        most += 1 if settings.alone else _tasks_of(os.getuid()) - 1
    cpu = math.ceil(limits["cpu_seconds"])
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (limits["file_mb"] * MIB,) * 2,
        resource.RLIMIT_NOFILE: (FILES,) * 2,
        resource.RLIMIT_MEMLOCK: (64 * 1024,) * 2,
        resource.RLIMIT_CORE: (1, 1),  # 0 would let the host's handler of core dumps run (core(5))
    }
    if settings.rlimit_processes:
        wanted[resource.RLIMIT_NPROC] = (most,) * 2
    if settings.rlimit_memory:
        wanted[resource.RLIMIT_DATA] = (limits["memory_mb"] * MIB,) * 2
    for kind, (soft, hard) in wanted.items():
        there = resource.getrlimit(kind)[1]
        hard = hard if there == resource.RLIM_INFINITY else min(hard, there)
        resource.setrlimit(kind, (min(soft, hard), hard))
    for descriptor in joins:
        os.write(descriptor, b"0")  # 0 stands for the process that writes


def _tasks_of(uid: int) -> int:
    """Return the number of threads of a user's processes, as far as these are visible."""
    count = 0
    for pid in _all_pids():
        with suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def others(alone: bool) -> list[int]:
    """Return the pids of all processes of the sandbox except this one.

    Without a pid namespace these are its descendants, including those that wait to be reaped.
    """
    if alone:
        return [pid for pid in _all_pids() if pid != 1]
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        if fields := stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def kill(alone: bool) -> None:
    """Send SIGKILL to all processes of the sandbox except this one.

    In a pid namespace the kernel kills all at once. Elsewhere, a process that was forked meanwhile needs another call.
    """
    if alone and os.getpid() == 1:  # outside of a pid namespace, -1 means every process of the user
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    for pid in others(alone):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state (proc(5))."""
    return proc_file(pid, "stat", "").rpartition(")")[2].split()


def proc_file(pid: int, file: str, absent: str) -> str:
    """Return the content of /proc/PID/FILE, or `absent` where it cannot be read."""
    try:
        with open(f"/proc/{pid}/{file}", errors="replace") as text:
            return text.read()
    except OSError:  # it has ended, or is not visible
        return absent
