"""Who is there, told by files on a shared file system: a folder, and in it a file for each, written anew every few
seconds by whoever it stands for.

Clocks of machines differ, and a file system may be slow, show an old file for a while, or answer for minutes to nobody.
So no moment is written: a file has a number that grows, and a reader measures by its own clock for how long it has not
grown, counting only time in which it could read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import jsonl

RENEW_SECONDS = 5.0
LEASE_SECONDS = 60.0
"""After which one that was not renewed has ended."""
COUNTED_SECONDS = 2 * RENEW_SECONDS
"""A reader that looks again later than this may have been held up, and the writer with it: no more of it counts."""
MISSED = 3
"""Looks in a row that must miss a lease before anything is ended for it: a file may be between two names."""
SUFFIX = ".lease"


class Lease:
    """One's own file; `facts` are for its readers."""

    def __init__(
        self,
        path: Path,
        facts: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        every: float = RENEW_SECONDS,
    ) -> None:
        self._path, self._facts, self._clock, self._every = path, facts, clock, every
        self._number, self._renewed_at = 0, -every
        self._failing = False

    def renew(self, **facts: Any) -> None:
        """Write it when it is time, with these facts beside its own. A file system that refuses is told of once, and
        asked again: it may come back before the lease ends."""
        now = self._clock()
        if now - self._renewed_at < self._every:
            return
        self._number, self._renewed_at = self._number + 1, now
        try:
            self._path.parent.mkdir(exist_ok=True)
            jsonl.replace(self._path, {"number": self._number, **self._facts, **facts})
        except OSError as error:
            if not self._failing:
                print(f"asyncrl: cannot renew {self._path}: {error}; tried again", file=sys.stderr, flush=True)
            self._failing = True
        else:
            self._failing = False

    def end(self) -> None:
        """It stands for nobody any more."""
        self._path.unlink(missing_ok=True)


@dataclass
class _Seen:
    told: dict[str, Any]
    unchanged: float = 0.0
    """Seconds in which we looked, and its number was the same."""


class Leases:
    """Those of a folder, for one reader that looks again and again."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LEASE_SECONDS,
        every: float = RENEW_SECONDS,
    ) -> None:
        """Those that are not renewed for `seconds` have ended; their owners renew them `every` so many."""
        self._folder, self._clock, self._seconds, self._every = folder, clock, seconds, every
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    def look(self) -> dict[str, dict[str, Any]]:
        """Facts of those that hold, by name. What cannot be read now is as it was."""
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
        except (OSError, ValueError):  # slow, or in the middle of a change: no proof of anything
            return
        if name in self._seen and self._seen[name].told == told:
            self._seen[name].unchanged += passed
        else:
            self._seen[name] = _Seen(told)


class Watched(Leases):
    """One lease, that of whoever must outlive the reader. It reads this file alone: thousands may watch it."""

    def __init__(
        self,
        path: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        every: float = COUNTED_SECONDS,
    ) -> None:
        """`seconds`: it may be held up for so long. Looked at `every` so many."""
        super().__init__(path.parent, clock, seconds)
        self._look_every = every
        self._name, self._missed, self._was_there = path.name, 0, False

    def _names(self) -> set[str]:
        return {self._name} if (self._folder / self._name).exists() else set()

    def ended(self) -> bool:
        """Whether it was there, and is no more. To be asked again and again; it looks when it is time."""
        if self._clock() - self._looked_at < self._look_every:
            return False
        if self.look():
            self._was_there, self._missed = True, 0
        else:
            self._missed += 1
        return self._was_there and self._missed >= MISSED
