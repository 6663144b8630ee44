"""Leases on a shared file system, which show that processes are alive.

A folder has one file per process, which its owner rewrites every few seconds. The clocks of machines differ, and a file
system may be slow, show an old file for a while, or not respond for minutes. Therefore a file contains no timestamp but
a number that grows. A reader measures with its own clock for how long the number has not changed, and counts only time
in which it could read the file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import jsonl

RENEW_SECONDS = 5.0
LEASE_SECONDS = 60.0
"""Time after which a lease that was not renewed has expired."""
SUFFIX = ".lease"


class Lease:
    """A process's own lease. `facts` are written into it for its readers."""

    def __init__(
        self,
        path: Path,
        facts: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        every: float = RENEW_SECONDS,
    ) -> None:
        self._path = path
        self._facts = facts
        self._clock = clock
        self._every = every
        self._number, self._renewed_at = 0, -every
        self._failing = False

    def renew(self, **facts: Any) -> None:
        """Write the lease if a renewal is due, with these facts in addition to its own.

        A write error is reported once and retried, because the file system may recover before the lease expires.
        """
        now = self._clock()
        if now - self._renewed_at < self._every:
            return
        self._number, self._renewed_at = self._number + 1, now
        try:
            self._path.parent.mkdir(exist_ok=True)
            jsonl.replace(self._path, {"number": self._number, **self._facts, **facts})
        except OSError as error:
            if not self._failing:
                print(f"asyncrl: cannot renew {self._path}: {error}; retrying", file=sys.stderr, flush=True)
            self._failing = True
        else:
            self._failing = False

    def end(self) -> None:
        """Release the lease. One that cannot be deleted expires."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


@dataclass
class _Seen:
    told: dict[str, Any]
    unchanged: float = 0.0
    """Observed seconds in which the number did not change."""


class Leases:
    """Leases of a folder, for one reader that polls them."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LEASE_SECONDS,
        every: float = RENEW_SECONDS,
    ) -> None:
        """Create a reader. Owners renew leases every `every` seconds; after `seconds` without renewal they expire."""
        self._folder = folder
        self._clock = clock
        self._seconds = seconds
        self._every = every
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    def look(self) -> dict[str, dict[str, Any]]:
        """Return the facts of the valid leases by name. A lease that cannot be read now keeps its last state."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, 2 * self._every), now
        try:
            names = self._names()
        except FileNotFoundError:
            names = set()
        except OSError:
            names = set(self._seen)
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            self._read(name, passed)
        held = {name: seen for name, seen in self._seen.items() if seen.unchanged < self._seconds}
        return {name.removesuffix(SUFFIX): seen.told for name, seen in sorted(held.items())}

    def _names(self) -> set[str]:
        return {name for name in os.listdir(self._folder) if name.endswith(SUFFIX)}

    def _read(self, name: str, passed: float) -> None:
        try:
            told = json.loads((self._folder / name).read_text())
        except (OSError, ValueError):  # the file system is slow, or the file is being replaced
            return
        if name in self._seen and self._seen[name].told == told:
            self._seen[name].unchanged += passed
        else:
            self._seen[name] = _Seen(told)
