"""The seccomp(2) filter that refuses system calls to programs in a sandbox; libseccomp builds it.

Namespaces already refuse most of these calls. The filter refuses the parts of the kernel that namespaces do not divide
(AF_VSOCK reaches the host of a virtual machine from any network namespace; keyrings), new namespaces (the source of
most recent vulnerabilities of the kernel), and calls that would affect the worker, which is process 1 and may have the
same uid.
"""

from __future__ import annotations

import errno
import os
import platform

FORBIDDEN = (
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "memfd_secret",
    "mount",
    "umount2",
    "pivot_root",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "unshare",
    "setns",
    "add_key",
    "request_key",
    "keyctl",
    "open_by_handle_at",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "quotactl",
    "acct",
    "swapon",
    "reboot",
    "shmget",
    "msgget",
    "semget",
)
"""Calls that fail with EPERM."""
MACHINES = ("x86_64", "aarch64")
CLONE_NEW = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
"""Flags of clone(2) for new namespaces: mount, cgroup, UTS, IPC, user, pid, network."""
_LOW_HALF = 0xFFFFFFFF
"""The kernel reads 32 bits of an argument that is an int, so the upper half is masked out."""


class Unavailable(Exception):
    """Raised if the filter cannot be built on this machine. The message says why."""


def program(*, sockets: bool, unseen_memory: bool, machine: str | None = None) -> bytes:
    """Return the filter as a BPF program. Raises Unavailable.

    sockets        whether programs may create sockets; False where they would reach the network of the host
    unseen_memory  whether programs may allocate memory that no process owns (memfd); False where it cannot be counted
    machine        "x86_64" or "aarch64"; None: this machine
    """
    if (machine or platform.machine()) not in MACHINES:
        raise Unavailable(f"no filter is defined for the processor {machine or platform.machine()}")
    try:
        import pyseccomp as libseccomp
    except (ImportError, RuntimeError) as error:  # the package is missing, or the library that it loads
        raise Unavailable(f"pyseccomp or libseccomp.so.2 is not installed ({error})") from None
    arg, refuse = libseccomp.Arg, libseccomp.ERRNO
    rules = libseccomp.SyscallFilter(libseccomp.ALLOW)
    if machine:
        foreign = getattr(libseccomp.Arch, machine.upper())
        if not rules.exist_arch(foreign):
            rules.add_arch(foreign)
            rules.remove_arch(libseccomp.Arch.NATIVE)
    rules.set_attr(libseccomp.Attr.ACT_BADARCH, refuse(errno.EPERM))  # 32-bit programs, and x32

    def equal(place: int, value: int) -> object:
        return arg(place, libseccomp.MASKED_EQ, _LOW_HALF, value)

    def only(call: str, families: tuple[int, ...]) -> None:
        """Refuse a call unless its first argument is one of these address families."""
        above = max(families, default=-1) + 1
        for family in set(range(above)) - set(families):
            rules.add_rule(refuse(errno.EAFNOSUPPORT), call, arg(0, libseccomp.EQ, family))
        rules.add_rule(refuse(errno.EAFNOSUPPORT), call, arg(0, libseccomp.GE, above))

    try:
        for call in FORBIDDEN:
            rules.add_rule(refuse(errno.EPERM), call)
        rules.add_rule(refuse(errno.ENOSYS), "clone3")  # its flags lie in memory; libc then uses clone
        for flag in CLONE_NEW:
            rules.add_rule(refuse(errno.EPERM), "clone", arg(0, libseccomp.MASKED_EQ, flag, flag))
        if not unseen_memory:
            rules.add_rule(refuse(errno.ENOSYS), "memfd_create")
        only("socket", (1, 2, 10, 16) if sockets else ())  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
        only("socketpair", (1,))
        for call in ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr"):
            rules.add_rule(refuse(errno.EPERM), call, equal(0, 1))
        for call, everything_of_the_user in (("setpriority", 2), ("ioprio_set", 3)):
            rules.add_rule(refuse(errno.EPERM), call, equal(0, everything_of_the_user))
            rules.add_rule(refuse(errno.EPERM), call, equal(1, 1))
        with os.fdopen(os.memfd_create("filter"), "w+b") as file:
            rules.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise Unavailable(f"the installed libseccomp is too old ({error})") from None
