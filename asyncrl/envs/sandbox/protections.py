"""What protects the machine from the programs of a backend, and what does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["bubblewrap", "unsafe"]
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
_OF_NAMESPACES = {
    "network": "a network namespace with a loopback and nothing else",
    "files": "a root of its own: /usr and Python read-only, its own /proc and /dev",
    "secrets": "nothing of the run's environment, and no process of it can be seen",
    "signals": "a pid namespace of its own",
    "kill": "the kernel ends a pid namespace as a whole",
    "disk": "a tmpfs of that size",
}
_INSTEAD = {
    "network": "it has the machine's",
    "files": "whatever its uid may read and write, and all processes can be seen",
    "secrets": "the environment of every process of this user can be read",
    "signals": "every process of this user can be signalled and traced",
    "kill": "descendants are found and killed one by one",
    "memory": "each process is bounded (RLIMIT_DATA), all of them only by looking every 50 ms",
    "processes": "RLIMIT_NPROC counts all processes of this user, so they are looked at every 50 ms",
    "disk": "the size of each file is bounded (RLIMIT_FSIZE), not that of all together",
    "syscalls": "AF_VSOCK, keyrings, namespaces can be had",
}


@dataclass(frozen=True)
class Protections:
    """Those of one backend on one machine."""

    kind: Kind
    holds: Mapping[str, str]  # by name: how
    lacks: Mapping[str, str]  # by name: what is there instead

    @property
    def isolated(self) -> bool:
        """Return whether what a program does stays within its sandbox."""
        return {"network", "files", "secrets", "signals", "kill"} <= self.holds.keys()

    def missing(self, required: Collection[str]) -> list[str]:
        """Return those required that do not hold. Raises ValueError for a name that is none."""
        if unknown := set(required) - set(NAMES):
            raise ValueError(f"unknown protections {sorted(unknown)}; there are {', '.join(NAMES)}")
        return [name for name in NAMES if name in required and name not in self.holds]

    def __str__(self) -> str:
        lines = [f"sandboxes: {self.kind}"]
        lines += [f"  {name:10} {how}" for name, how in self.holds.items()]
        return "\n".join([*lines, *(f"  {name:10} NOT PROTECTED: {instead}" for name, instead in self.lacks.items())])


def in_force(kind: Kind, *, own_uid: bool, counted: bool, bounds: Collection[str], unfiltered: str) -> Protections:
    """Return what holds.

    own_uid     whether programs have a uid that nobody else has
    counted     whether the kernel counts the processes of one sandbox for RLIMIT_NPROC
    bounds      what control groups bound
    unfiltered  why there is no system-call filter, if there is none
    """
    isolated = kind == "bubblewrap"
    holds = dict(_OF_NAMESPACES) if isolated else {}
    if not isolated and not unfiltered:
        holds["network"] = "no socket can be made"
    if not isolated and own_uid:
        holds |= dict.fromkeys(("secrets", "signals"), "a uid of its own")
    if "memory" in bounds:
        holds["memory"] = "by a control group"
    if "pids" in bounds:
        holds["processes"] = "by a control group"
    elif counted and (own_uid or isolated):
        holds["processes"] = "by RLIMIT_NPROC of a uid or user namespace of its own"
    if not unfiltered:
        holds["syscalls"] = "by a seccomp filter"
    lacks = {**_INSTEAD, "syscalls": f"{_INSTEAD['syscalls']}, for there is no filter: {unfiltered}"}
    return Protections(
        kind,
        {name: holds[name] for name in NAMES if name in holds},
        {name: lacks[name] for name in NAMES if name not in holds},
    )
