"""What a process of the run is doing, told to the launcher by a file that it renews: RUN/progress/NAME.lease.

A process that hangs dies of nothing. The launcher (launch/stalls.py) learns here that one has not gone on for longer
than what it does may take, or has stopped renewing its file at all.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.leases import SUFFIX, Lease

FOLDER = "progress"
TELL = signal.SIGUSR2
"""A process that has a Progress writes the stacks of its threads to its log when it gets this."""


def renew_seconds(patience: float) -> float:
    """Between two renewals, and between two looks: some thousand processes may share the file system."""
    return min(30.0, max(0.25, patience / 20))


class Progress:
    """Of one process. `doing` and `part` may be called as often as every micro-batch: they write nothing."""

    def __init__(
        self, run_dir: Path, name: str, patience: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience` in seconds: what it does may take so long unless it says otherwise. None: nobody watches."""
        self._patience, self._clock = patience, clock
        self._every = renew_seconds(patience or 0.0)
        self._what, self._part, self._within = "starting", "", patience or 0.0
        self._began = self._renewed_at = clock()
        self._lease = Lease(run_dir / FOLDER / f"{name}{SUFFIX}", {}, clock, self._every / 2)
        self._ended = threading.Event()

    def watch(self) -> None:
        """Renew it from a thread, which goes on while the process hangs; and answer TELL."""
        if self._patience is None:
            return
        faulthandler.register(TELL, all_threads=True)
        self.renew()
        threading.Thread(target=self._renew_until_end, name="progress", daemon=True).start()

    def doing(self, what: str, within: float | None = None) -> None:
        """From now on; `within` so many seconds, where it waits for others."""
        self._what, self._part, self._began = what, "", self._clock()
        self._within = self._patience or 0.0 if within is None else within

    def part(self, which: str) -> None:
        """It goes on with what it does: this part of it."""
        self._part, self._began = which, self._clock()

    def renew(self) -> None:
        """Write it down when it is time."""
        now = self._clock()
        if (skipped := now - self._renewed_at - 2 * self._every) > 0:  # it was stopped, and everybody with it perhaps
            self._began = min(now, self._began + skipped)
        self._renewed_at = now
        what = f"{self._what}, {self._part}" if self._part else self._what
        self._lease.renew(doing=what, seconds=round(now - self._began, 3), within=self._within)

    async def follow(self) -> None:
        """From an event loop, for ever: it goes on as long as the loop does."""
        while True:
            self.doing("serves")
            await asyncio.sleep(self._every)

    def end(self) -> None:
        """It has done all that it was there for."""
        self._ended.set()
        self._lease.end()

    def _renew_until_end(self) -> None:
        while not self._ended.wait(self._every):
            self.renew()
        self._lease.end()  # the last renewal may have come after the end
