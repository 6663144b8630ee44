"""Which processes descend from another, and their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def descendants(root: int, spared: Sequence[int] = ()) -> list[int]:
    """Pids of a process's descendants, with those that wait to be reaped, without those spared and theirs."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    found, left = [], [root]
    while left:
        below = [pid for pid in children.get(left.pop(), ()) if pid not in spared]
        found += below
        left += below
    return found


def kill_descendants(root: int, spared: Sequence[int] = ()) -> list[int]:
    """SIGKILL to each; who they are. One that forks meanwhile must be killed again."""
    found = descendants(root, spared)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found
