"""Names that say whose a folder or a control group is, so that what a dead process left is found and removed.

    asyncrl-sandbox-NAMESPACE-PID-STARTED-NUMBER        STARTED: clock ticks after boot (field 22 of /proc/PID/stat)

The pid namespace is part of it: containers may share folders, and a pid says nothing outside of its namespace.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "asyncrl-sandbox"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-\d+")


@dataclass(frozen=True)
class Marker:
    """Of a process."""

    namespace: int
    pid: int
    started: int

    @classmethod
    def mine(cls) -> Marker:
        """This process's."""
        pid = os.getpid()
        return cls(_namespace(), pid, started(pid))

    @classmethod
    def of(cls, name: str) -> Marker | None:
        """Whose a name is; None for names of others."""
        match = _NAME.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

    def name(self, number: int) -> str:
        """For one of this process's sandboxes."""
        return f"{PREFIX}-{self.namespace}-{self.pid}-{self.started}-{number}"

    def alive(self) -> bool:
        """Whether that process runs; so is one of which nothing can be known here."""
        if self.namespace != _namespace():
            return True
        try:
            return started(self.pid) == self.started
        except (FileNotFoundError, ProcessLookupError):
            return False


def started(pid: int) -> int:
    """When a process began; -1 for one that has ended and waits to be reaped. Raises FileNotFoundError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
