"""Which users supervisors and guests are on the host.

Root gives every sandbox three uids that nobody has, so that its guests are strangers to their supervisor, to the host
and to each other, and the kernel counts the processes of each; the third is for programs beside a guest (beside.py).
Anybody else has one uid to give, their own.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from asyncrl.envs.sandbox.view import BESIDE_UID, UID

_HIGHEST = 2_100_000_000
"""Above the ranges that distributions hand out to users and containers."""
_COUNTED_BY_NAMESPACE = (5, 14)
"""Before this Linux RLIMIT_NPROC counts the processes of a user on the machine, whatever the namespace."""
_SANDBOXES, _OF_A_SPAWNER = 1 << 24, 1 << 10


@dataclass(frozen=True)
class Identity:
    """Of a spawner."""

    uid: int
    gid: int
    pid: int
    strangers: tuple[int, int] | None  # first and number of uids, also of gids, to be given away

    @classmethod
    def mine(cls) -> Identity:
        """This process's. Root of a container has the ids of the container's map."""
        strangers = None
        if os.geteuid() == 0:
            ranges = [_largest(Path(f"/proc/self/{kind}_map").read_text()) for kind in ("uid", "gid")]
            first = max(first for first, _ in ranges)
            end = min(first + count for first, count in ranges)
            strangers = (first, end - first) if end - first >= 6 else None
        return cls(os.geteuid(), os.getegid(), os.getpid(), strangers)

    @property
    def own(self) -> bool:
        """Whether guests have a uid of their own."""
        return self.strangers is not None

    @property
    def counted(self) -> bool:
        """Whether RLIMIT_NPROC of a sandbox in a user namespace, or of a uid of its own, counts its processes alone."""
        release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
        return self.own or release >= _COUNTED_BY_NAMESPACE

    def stranger(self, number: int) -> int:
        """uid and gid on the host of a sandbox's guests; its supervisor's is the one before, that of programs beside
        the guests the one before that."""
        assert self.strangers
        first, count = self.strangers
        last = min(first + count - 1, _HIGHEST)
        sandboxes = min(_SANDBOXES, (last - first + 1) // 3)
        return last - 3 * ((self.pid * _OF_A_SPAWNER + number % _OF_A_SPAWNER) % sandboxes)

    def strangers_of(self, number: int) -> tuple[int, int] | tuple[None, None]:
        """Of a sandbox's guests and of programs beside them, on the host; None where there are none to give."""
        if not self.own:
            return None, None
        guest = self.stranger(number)
        return guest, guest - 2

    def write_maps(self, process: int, number: int) -> None:
        """Of a process that has just made its user namespace (user_namespaces(7)). Raises OSError."""
        folder = Path(f"/proc/{process}")
        if self.own:
            guest = self.stranger(number)
            for kind in ("uid", "gid"):
                (folder / f"{kind}_map").write_text(f"0 {guest - 1} 1\n{UID} {guest} 1\n{BESIDE_UID} {guest - 2} 1\n")
        else:
            (folder / "setgroups").write_text("deny")
            (folder / "uid_map").write_text(f"{UID} {self.uid} 1\n")
            (folder / "gid_map").write_text(f"{UID} {self.gid} 1\n")


def _largest(text: str) -> tuple[int, int]:
    ranges = [tuple(map(int, line.split())) for line in text.splitlines()]
    inside, _, count = max(ranges, key=lambda found: found[2])
    return inside, count
