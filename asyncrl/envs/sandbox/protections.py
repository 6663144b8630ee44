"""What protects the machine from the guests of a backend, and what does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

NAMES = ("network", "files", "secrets", "signals", "kill", "memory", "processes", "disk", "syscalls")
"""
network     nothing outside of the sandbox can be reached
files       of the host only what a program needs can be read, nothing can be written, and no process be seen
secrets     the environment and the memory of the run's processes cannot be read
signals     processes outside of the sandbox can be neither signalled nor traced
kill        whatever a call started ends with it, and with the run, at once and as a whole
memory      of all processes of a sandbox together is bounded
processes   their number is bounded
disk        what a sandbox can write is bounded
syscalls    much of the kernel is out of reach
"""


@dataclass(frozen=True)
class Protections:
    """Of one backend on one machine."""

    kind: str
    holds: Mapping[str, str]  # by name: how
    lacks: Mapping[str, str]  # by name: what is there instead

    @property
    def isolated(self) -> bool:
        """Whether what a guest does stays within its sandbox."""
        return {"network", "files", "secrets", "signals", "kill"} <= self.holds.keys()

    def missing(self, required: Collection[str]) -> list[str]:
        """Those required that do not hold. Raises ValueError for a name that is none."""
        if unknown := set(required) - set(NAMES):
            raise ValueError(f"unknown protections {sorted(unknown)}; there are {', '.join(NAMES)}")
        return [name for name in NAMES if name in required and name not in self.holds]

    def __str__(self) -> str:
        lines = [f"sandboxes: {self.kind}"]
        lines += [f"  {name:10} {how}" for name, how in self.holds.items()]
        return "\n".join([*lines, *(f"  {name:10} NOT PROTECTED: {instead}" for name, instead in self.lacks.items())])


def in_force(kind: str, *, own_uid: bool, counted: bool, bounds: Sequence[str], filtered: bool) -> Protections:
    """Of a kind, when guests have a uid of their own, RLIMIT_NPROC counts theirs alone, a control group bounds these,
    and system calls are filtered."""
    holds, lacks = _by_namespaces() if kind != "processes" else _without(own_uid, filtered)
    if "memory" in bounds:
        holds["memory"] = "of all processes, by a control group"
    else:
        lacks["memory"] = "each process is bounded (RLIMIT_DATA), all of them only by looking every 50 ms"
    if "pids" in bounds:
        holds["processes"] = "by a control group"
    elif counted and (own_uid or kind != "processes"):
        holds["processes"] = "by RLIMIT_NPROC of a uid or user namespace of its own"
    else:
        lacks["processes"] = "RLIMIT_NPROC counts all processes of this user, so they are looked at every 50 ms"
    if filtered:
        holds["syscalls"] = "by a seccomp filter"
    else:
        lacks["syscalls"] = "no filter for this architecture: AF_VSOCK, keyrings, namespaces can be had"
    return Protections(kind, *({name: found[name] for name in NAMES if name in found} for found in (holds, lacks)))


def _by_namespaces() -> tuple[dict[str, str], dict[str, str]]:
    holds = {
        "network": "a network namespace with a loopback and nothing else",
        "files": "a root of its own: /usr and Python read-only, its own /proc and /dev",
        "secrets": "nothing of the run's environment, and no process of it can be seen",
        "signals": "a pid namespace of its own",
        "kill": "the kernel ends a pid namespace as a whole",
        "disk": "a tmpfs of that size",
    }
    return holds, {}


def _without(own_uid: bool, filtered: bool) -> tuple[dict[str, str], dict[str, str]]:
    holds: dict[str, str] = {}
    lacks = {
        "files": "whatever its uid may read and write, and all processes can be seen",
        "kill": "descendants are found and killed one by one",
        "disk": "its folder is looked at, and /tmp and others are not",
    }
    if filtered:
        holds["network"] = "no socket can be made"
    else:
        lacks["network"] = "it has the machine's"
    if own_uid:
        holds["secrets"] = "a uid of its own"
        holds["signals"] = "a uid of its own"
    else:
        lacks["secrets"] = "the environment of every process of this user can be read"
        lacks["signals"] = "every process of this user can be signalled and traced"
    return holds, lacks
