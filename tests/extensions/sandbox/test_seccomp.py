"""The filter refuses what it must and nothing else: libseccomp's program is run here, as the kernel would run it."""

from __future__ import annotations

import errno
import struct
import sys
from functools import cache

import pyseccomp
import pytest

from asyncrl.extensions.sandbox import seccomp

MACHINES = seccomp.MACHINES
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
UNIX, INET, INET6, NETLINK, PACKET, VSOCK, ALG = 1, 2, 10, 16, 17, 40, 38
BY_PID = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
INSPECTED = ("clone3", "memfd_create", "clone", "socket", "socketpair", "setpriority", "ioprio_set", *BY_PID)
program = cache(seccomp.program)


def number_of(machine: str, name: str) -> int:
    return pyseccomp.resolve_syscall(getattr(pyseccomp.Arch, machine.upper()), name)


def verdict(
    machine: str,
    name: str | int,
    *arguments: int,
    sockets: bool = True,
    unseen_memory: bool = True,
    architecture: int | None = None,
) -> int:
    """The errno with which a system call is refused; 0 when it is let through."""
    code = program(sockets=sockets, unseen_memory=unseen_memory, machine=machine)
    known = ARCHITECTURES[machine] if architecture is None else architecture
    number = number_of(machine, name) if isinstance(name, str) else name
    data = struct.pack("=iIQ6Q", number, known, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions, place, value = list(struct.iter_unpack("=HBBI", code)), 0, 0
    while True:
        operation, if_true, if_false, constant = instructions[place]
        place += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, constant)
            case 0x54:
                value &= constant
            case 0x05:
                place += constant
            case 0x15:
                place += if_true if value == constant else if_false
            case 0x25:
                place += if_true if value > constant else if_false
            case 0x35:
                place += if_true if value >= constant else if_false
            case 0x45:
                place += if_true if value & constant else if_false
            case 0x06:
                assert constant == 0x7FFF0000 or constant >> 16 == 5
                return 0 if constant == 0x7FFF0000 else constant & 0xFFFF
            case _:
                raise AssertionError(operation)


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_are_let_through(machine: str) -> None:
    refusable = {number_of(machine, name) for name in (*seccomp.FORBIDDEN, *INSPECTED)}
    assert [number for number in range(460) if number not in refusable and verdict(machine, number)] == []


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", seccomp.FORBIDDEN)
def test_what_no_guest_needs_is_refused(machine: str, name: str) -> None:
    assert verdict(machine, name) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_of_the_own_network_can_be_made_and_no_others(machine: str) -> None:
    for family in (UNIX, INET, INET6, NETLINK):
        assert verdict(machine, "socket", family) == 0
        assert verdict(machine, "socket", family, sockets=False) == errno.EAFNOSUPPORT
    for family in (0, PACKET, ALG, VSOCK, 1 << 31, 1 << 32 | VSOCK):  # of 64 bits the kernel reads 32
        assert verdict(machine, "socket", family) == errno.EAFNOSUPPORT
    assert verdict(machine, "socketpair", UNIX, sockets=False) == 0
    assert verdict(machine, "socketpair", VSOCK) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_and_forks_pass_and_namespaces_do_not(machine: str) -> None:
    fork, thread = 0x01200011, 0x003D0F00
    assert [verdict(machine, "clone", flags) for flags in (fork, thread)] == [0, 0]
    for bit in (17, 25, 26, 27, 28, 29, 30):  # CLONE_NEWNS ... CLONE_NEWNET
        assert verdict(machine, "clone", fork | 1 << bit) == errno.EPERM
    assert verdict(machine, "clone3") == errno.ENOSYS  # its flags lie in memory


@pytest.mark.parametrize("machine", MACHINES)
def test_process_1_is_out_of_reach_and_a_guests_own_are_not(machine: str) -> None:
    for name in BY_PID:
        assert [verdict(machine, name, pid) for pid in (0, 1, 1 << 32 | 1, 2)] == [0, errno.EPERM, errno.EPERM, 0]
    for name, everybody in (("setpriority", 2), ("ioprio_set", 3)):
        process = everybody - 2
        assert [verdict(machine, name, process, pid) for pid in (0, 1, 2)] == [0, errno.EPERM, 0]
        assert verdict(machine, name, everybody, 0) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_of_no_process_needs_counting(machine: str) -> None:
    assert verdict(machine, "memfd_create") == 0
    assert verdict(machine, "memfd_create", unseen_memory=False) == errno.ENOSYS
    assert verdict(machine, "memfd_secret") == errno.EPERM


def test_calls_of_another_architecture_are_refused() -> None:
    i386 = 0x40000003
    assert verdict("x86_64", 20, architecture=i386) == errno.EPERM
    assert verdict("x86_64", 0x40000000 | 39) == errno.EPERM  # x32
    assert verdict("aarch64", 0, architecture=i386) == errno.EPERM


def test_without_libseccomp_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(seccomp.Unavailable, match="no filter is defined for the processor riscv64"):
        seccomp.program(sockets=True, unseen_memory=True, machine="riscv64")
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(seccomp.Unavailable, match=r"libseccomp\.so\.2 is not installed"):
        seccomp.program(sockets=True, unseen_memory=True)
