"""Protections of the machine against the programs of a backend: which hold, and which do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["bubblewrap", "unsafe"]
NAMES = ("network", "files", "secrets", "signals", "kill", "memory", "processes", "disk", "syscalls")
"""
network     nothing outside of the sandbox can be reached
files       programs can read only the files of the host that they need, write none, and see no other process
secrets     the environment and the memory of the run's processes cannot be read
signals     processes outside of the sandbox can be neither signalled nor traced
kill        all processes that a call started are killed at once when the call or the run ends
memory      the memory of all processes of a sandbox together is bounded
processes   the number of its processes is bounded
disk        the total size of the files that a sandbox writes is bounded
syscalls    a filter refuses system calls that programs do not need
"""
_OF_NAMESPACES = {
    "network": "a network namespace that has only a loopback interface",
    "files": "a root directory of its own: /usr and Python read-only, its own /proc and /dev",
    "secrets": "programs see neither the environment nor the processes of the run",
    "signals": "a pid namespace of its own",
    "kill": "the kernel ends a pid namespace as a whole",
    "disk": "a tmpfs of limited size",
}
_INSTEAD = {
    "network": "programs have the network of the machine",
    "files": "programs can read and write what their uid may, and see all processes",
    "secrets": "programs can read the environment of every process of this user",
    "signals": "programs can signal and trace every process of this user",
    "kill": "descendants are found and killed one by one",
    "memory": "RLIMIT_DATA bounds each process; their sum is only checked every 50 ms",
    "processes": "RLIMIT_NPROC would count all processes of this user, so their number is only checked every 50 ms",
    "disk": "RLIMIT_FSIZE bounds the size of each file, but nothing bounds their sum",
    "syscalls": "programs can use AF_VSOCK, keyrings and new namespaces",
}


@dataclass(frozen=True)
class Protections:
    """Protections of one backend on one machine."""

    kind: Kind
    holds: Mapping[str, str]  # by name: what provides it
    lacks: Mapping[str, str]  # by name: what applies instead

    @property
    def isolated(self) -> bool:
        """Return whether programs are confined to their sandbox."""
        return {"network", "files", "secrets", "signals", "kill"} <= self.holds.keys()

    def missing(self, required: Collection[str]) -> list[str]:
        """Return the required protections that do not hold. Raises ValueError for an unknown name."""
        if unknown := set(required) - set(NAMES):
            raise ValueError(f"unknown protections {sorted(unknown)}; known are {', '.join(NAMES)}")
        return [name for name in NAMES if name in required and name not in self.holds]

    def __str__(self) -> str:
        lines = [f"sandboxes: {self.kind}"]
        lines += [f"  {name:10} {how}" for name, how in self.holds.items()]
        return "\n".join([*lines, *(f"  {name:10} NOT PROTECTED: {instead}" for name, instead in self.lacks.items())])


def in_force(kind: Kind, *, own_uid: bool, counted: bool, bounds: Collection[str], unfiltered: str) -> Protections:
    """Return the protections that hold and those that do not.

    own_uid     whether programs have a uid that no other process has
    counted     whether the kernel counts the processes of one sandbox for RLIMIT_NPROC
    bounds      the resources that control groups bound: memory, pids
    unfiltered  why there is no system-call filter, if there is none
    """
    isolated = kind == "bubblewrap"
    holds = dict(_OF_NAMESPACES) if isolated else {}
    if not isolated and not unfiltered:
        holds["network"] = "programs cannot create sockets"
    if not isolated and own_uid:
        holds |= dict.fromkeys(("secrets", "signals"), "programs have a uid of their own")
    if "memory" in bounds:
        holds["memory"] = "a control group"
    if "pids" in bounds:
        holds["processes"] = "a control group"
    elif counted and (own_uid or isolated):
        holds["processes"] = "RLIMIT_NPROC of a uid or user namespace of its own"
    if not unfiltered:
        holds["syscalls"] = "a seccomp filter"
    lacks = {**_INSTEAD, "syscalls": f"{_INSTEAD['syscalls']}, because there is no filter: {unfiltered}"}
    return Protections(
        kind,
        {name: holds[name] for name in NAMES if name in holds},
        {name: lacks[name] for name in NAMES if name not in holds},
    )
