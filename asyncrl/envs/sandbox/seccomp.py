"""Which system calls a guest is refused (seccomp(2), a classic BPF program).

The namespaces already refuse most of this. The filter keeps guests from the parts of the kernel that namespaces do not
divide (AF_VSOCK reaches the host of a virtual machine from any network namespace, keyrings), from making namespaces of
their own, where most of the kernel's holes of the last years lay, and from a supervisor that must share their uid.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence

from asyncrl.envs.sandbox.linux import CLONE_NEWUSER, NEW_NAMESPACES, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_COMMON = {  # the same number everywhere
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
_X86_64 = {
    "socket": 41,
    "socketpair": 53,
    "clone": 56,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "open_by_handle_at": 304,
    "init_module": 175,
    "finit_module": 313,
    "delete_module": 176,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "quotactl": 179,
    "acct": 163,
    "swapon": 167,
    "reboot": 169,
    "shmget": 29,
    "msgget": 68,
    "semget": 64,
    "memfd_create": 319,
    "prlimit64": 302,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "sched_setaffinity": 203,
    "sched_setattr": 314,
    "setpriority": 141,
    "ioprio_set": 251,
}
_AARCH64 = {
    "socket": 198,
    "socketpair": 199,
    "clone": 220,
    "unshare": 97,
    "setns": 268,
    "mount": 40,
    "umount2": 39,
    "pivot_root": 41,
    "bpf": 280,
    "perf_event_open": 241,
    "userfaultfd": 282,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "open_by_handle_at": 265,
    "init_module": 105,
    "finit_module": 273,
    "delete_module": 106,
    "kexec_load": 104,
    "kexec_file_load": 294,
    "quotactl": 60,
    "acct": 89,
    "swapon": 224,
    "reboot": 142,
    "shmget": 194,
    "msgget": 186,
    "semget": 190,
    "memfd_create": 279,
    "prlimit64": 261,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "sched_setattr": 274,
    "setpriority": 140,
    "ioprio_set": 30,
}
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}  # AUDIT_ARCH_*
_BY_PID = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_BY_WHICH = {"setpriority": 2, "ioprio_set": 3}  # PRIO_USER, IOPRIO_WHO_USER

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
SECCOMP_MODE_FILTER = 2
Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def supported() -> bool:
    """Whether system calls of this machine are known."""
    return platform.machine() in _MACHINES


def program(*, sockets: bool, unseen_memory: bool, machine: str | None = None) -> bytes:
    """The filter.

    sockets        whether any may be made: where a guest has no network of its own, none
    unseen_memory  whether memory that belongs to no process may be had (memfd): where nobody can count it, none
    """
    architecture, own = _MACHINES[machine or platform.machine()]
    numbers = {**_COMMON, **own}
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        _error(errno.EPERM),  # 32-bit programs
        (_LOAD, 0, 0, _NUMBER),
    ]
    if own is _X86_64:
        code += [(_AT_LEAST, 0, 1, _X32), _error(errno.EPERM)]
    inspected = {"socket", "socketpair", "clone", "clone3", "memfd_create", *_BY_PID, *_BY_WHICH}
    for name in sorted(numbers.keys() - inspected):
        code += [(_EQUAL, 0, 1, numbers[name]), _error(errno.EPERM)]
    code += [
        (_EQUAL, 0, 1, numbers["clone3"]),
        _error(errno.ENOSYS),
    ]  # its flags are out of reach; libc then uses clone
    if not unseen_memory:
        code += [(_EQUAL, 0, 1, numbers["memfd_create"]), _error(errno.ENOSYS)]
    code += _when(numbers["clone"], 0, [(_ANY_BIT, 0, 1, NEW_NAMESPACES | CLONE_NEWUSER), _error(errno.EPERM)])
    allowed = FAMILIES if sockets else ()
    code += _when(numbers["socket"], 0, _unless(allowed, errno.EAFNOSUPPORT))
    code += _when(numbers["socketpair"], 0, _unless(FAMILIES[:1], errno.EAFNOSUPPORT))
    for name in _BY_PID:  # process 1 is the supervisor
        code += _when(numbers[name], 0, [(_EQUAL, 0, 1, 1), _error(errno.EPERM)])
    for name, everything_of_the_user in _BY_WHICH.items():
        body = [(_EQUAL, 0, 1, everything_of_the_user), _error(errno.EPERM), (_LOAD, 0, 0, _ARGUMENTS + 8)]
        code += _when(numbers[name], 0, [*body, (_EQUAL, 0, 1, 1), _error(errno.EPERM)])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(code: bytes) -> None:
    """For this process and its descendants, for ever; privileges can no longer be gained. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.pointer(_Program(len(code) // 8, code)))


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _when(number: int, argument: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run the body with the low half of an argument of this system call; whatever it does not refuse is allowed."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *body, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _unless(allowed: Sequence[int], number: int) -> list[Instruction]:
    """Refuse all but these values."""
    skips = [(_EQUAL, len(allowed) - place, 0, value) for place, value in enumerate(allowed)]
    return [*skips, _error(number)]
