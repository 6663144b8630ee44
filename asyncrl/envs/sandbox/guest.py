"""The beginning of a guest: a forked supervisor becomes the program of a call, with nothing that is not its own."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.envs.sandbox import linux, seccomp

FILES = 512
"""Open files of a process."""
MIB = 1024 * 1024
ABOVE = 32
"""Descriptors below are the command's."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes


@dataclass(frozen=True)
class Confinement:
    """What every guest of a sandbox is put under; made by the spawner, JSON on its way through bubblewrap."""

    limits: Mapping[str, Any]  # the fields of protocol.Limits
    uid: int | None  # of its own; None: the supervisor's
    folder: str
    environment: Mapping[str, str]
    rlimit_memory: bool  # bound the memory of each process: no group bounds that of all
    rlimit_processes: bool = True  # bound their number: the kernel counts none but this sandbox's,
    count_user: bool = False  # or those of the uid on the whole machine
    joins: Sequence[int] = ()  # descriptors of control groups
    sockets: bool = True
    filtered: bool = True
    nested: bool = False  # may have programs started beside it (beside.py),
    beside: int | None = None  # under this uid; None: the supervisor's
    gid: int | None = None  # unset: as the uid


def become(
    confinement: Confinement,
    home: int,
    command: Sequence[str],
    env: Mapping[str, str],
    pipes: Sequence[int],
    fault: int,
) -> NoReturn:
    """Of a forked process, all of whose descriptors are closed by exec: run the command with these as 0, 1, 2, ...

    Whatever cannot be set up is written to `fault`; a command that cannot be run is said on stderr, as a shell does.
    What an earlier guest can have spoilt (its folder, the memory of its control group) is no fault.
    """
    confined = False
    try:
        above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, ABOVE) for end in (fault, home, *confinement.joins, *pipes)]
        fault, home, joins, pipes = above[0], above[1], above[2 : -len(pipes)], above[-len(pipes) :]
        _confine(replace(confinement, joins=joins), pipes)
        confined = True
        _drop_to(confinement.uid, confinement.uid if confinement.gid is None else confinement.gid)
        os.fchdir(home)
        os.execvpe(command[0], list(command), {**confinement.environment, **env})
    except (OSError, ValueError) as error:
        if not confined:
            os.write(fault, str(error).encode(errors="replace"))
            os._exit(1)
        os.write(2, f"{command[0]}: {getattr(error, 'strerror', None) or error}\n".encode(errors="surrogateescape"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    finally:  # by an error of ours: never back into the supervisor's code
        os.write(fault, traceback.format_exc().encode(errors="replace"))
        os._exit(1)


def _confine(confinement: Confinement, pipes: Sequence[int]) -> None:
    os.setsid()
    for place, end in enumerate(pipes):
        os.dup2(end, place)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or its own files in /proc are not its own
    with suppress(OSError):  # on a machine without memory, guests go first
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.umask(0o022)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(ignored, signal.SIG_DFL)
    _limit(confinement)
    if confinement.filtered:
        seccomp.install(seccomp.program(sockets=confinement.sockets, unseen_memory=not confinement.rlimit_memory))
    else:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    for descriptor in confinement.joins:
        os.write(descriptor, b"0")  # whoever writes it


def _drop_to(uid: int | None, gid: int | None) -> None:
    """A user without privileges; the supervisor's own loses them with exec."""
    if uid is not None and gid is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(confinement: Confinement) -> None:
    limits = confinement.limits
    processes = limits["processes"]
    if confinement.count_user and confinement.uid is None:
        processes += tasks_of(os.getuid()) - 1  # without this one
    elif confinement.uid is None:
        processes += 1  # the supervisor
    cpu = math.ceil(limits["cpu_seconds"])
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (limits["file_mb"] * MIB,) * 2,
        resource.RLIMIT_NOFILE: (FILES,) * 2,
        resource.RLIMIT_MEMLOCK: (64 * 1024,) * 2,
        resource.RLIMIT_CORE: (1, 1),  # 0 would let the host's handler of core dumps run (core(5))
    }
    if confinement.rlimit_processes:
        wanted[resource.RLIMIT_NPROC] = (processes,) * 2
    if confinement.rlimit_memory:
        wanted[resource.RLIMIT_DATA] = (limits["memory_mb"] * MIB,) * 2
    for kind, (soft, hard) in wanted.items():
        most = resource.getrlimit(kind)[1]
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, hard), hard))


def tasks_of(uid: int) -> int:
    """Threads of a user, of those processes that can be seen."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has ended
                continue
    return count
