"""What a process tells the launcher: a file RUN/progress/NAME.lease that it renews while it runs, and a file
RUN/progress/NAME.failure with the error that ends it. On another machine, what starts it there notes its beginning in
NAME.begun, and in NAME.end how it ended.

A process that hangs does not exit, so its parent notices nothing. The launcher reads these files (launch/stalls.py) and
finds a process that has spent too long in one activity, or that has stopped renewing its file.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl import jsonl
from asyncrl.errors import AsyncRLError, PeerFailed, first_of, is_of_user, is_out_of_memory, place
from asyncrl.leases import SUFFIX, Lease

FOLDER = "progress"
FAILURE = ".failure"
"""Suffix of the file with the error that ended a process."""
DUMP_SIGNAL = signal.SIGUSR2
"""Signal on which a process that reports its progress writes the stacks of its threads to its log."""


def begin_file(run_dir: Path, name: str) -> Path:
    """Return the file that notes the beginning of a process on another machine."""
    return run_dir / FOLDER / f"{name}.begun"


def end_file(run_dir: Path, name: str) -> Path:
    """Return the file that notes the end of a process on another machine."""
    return run_dir / FOLDER / f"{name}.end"


def renew_seconds(patience: float) -> float:
    """Return the seconds between two renewals, and between two checks by the launcher.

    They grow with the deadline `patience`, because a thousand processes may share the file system.
    """
    return min(30.0, max(0.25, patience / 20))


class Progress:
    """Progress reports of one process. `doing` and `part` only set fields, so call them as often as you like."""

    def __init__(
        self, run_dir: Path, name: str, patience: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the reports. `patience` is an activity's default deadline in seconds; None disables the reports."""
        self._patience, self._clock = patience, clock
        self._every = renew_seconds(patience or 0.0)
        self._what, self._part, self._within = "starting", "", patience or 0.0
        self._began = self._renewed_at = clock()
        self._lease = Lease(run_dir / FOLDER / f"{name}{SUFFIX}", {}, clock, self._every / 2)
        self._ended = threading.Event()

    def watch(self) -> None:
        """Renew the file from a thread, which goes on while the process hangs, and answer DUMP_SIGNAL."""
        if self._patience is None:
            return
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        self.renew()
        threading.Thread(target=self._renew_until_end, name="progress", daemon=True).start()

    def doing(self, what: str, within: float | None = None) -> None:
        """Record a new activity. `within` is its deadline in seconds where it may exceed the default."""
        self._what, self._part, self._began = what, "", self._clock()
        self._within = self._patience or 0.0 if within is None else within

    def part(self, which: str) -> None:
        """Record that the activity goes on with its next part; the deadline starts anew."""
        self._part, self._began = which, self._clock()

    def renew(self) -> None:
        """Write the file when a renewal is due."""
        now = self._clock()
        if (skipped := now - self._renewed_at - 2 * self._every) > 0:  # the process was stopped, maybe with its run
            self._began = min(now, self._began + skipped)
        self._renewed_at = now
        what = f"{self._what}, {self._part}" if self._part else self._what
        self._lease.renew(doing=what, seconds=round(now - self._began, 3), within=self._within)

    async def follow(self) -> None:
        """Report progress from an event loop for as long as the loop runs its tasks."""
        while True:
            self.doing("serving")
            await asyncio.sleep(self._every)

    def end(self) -> None:
        """Stop reporting, and remove the file."""
        self._ended.set()
        self._lease.end()

    def _renew_until_end(self) -> None:
        while not self._ended.wait(self._every):
            self.renew()
        self._lease.end()  # a renewal may have raced with end()


@contextmanager
def failing(run_dir: Path, name: str) -> Iterator[None]:
    """Record the first error that leaves this context, for the launcher to show. A later one, for example of something
    that is closed afterwards, does not replace it; the failure of a peer is the peer's to record."""
    file = run_dir / FOLDER / f"{name}{FAILURE}"
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as raised:
        error = first_of(raised)
        if not file.exists() and not isinstance(error, PeerFailed):
            own = isinstance(error, AsyncRLError)
            text, where = str(error) if own else f"{type(error).__name__}: {error}", place(error)
            memory = is_out_of_memory(error)
            lasting = not memory and (own or is_of_user(where))  # it would only happen again
            where = "" if own and not is_of_user(where) else where  # a package that called us is not at fault
            failure = {"process": name, "time": time.time(), "error": text, "place": where}
            with suppress(OSError):  # the disk may be full, which must not hide the error in the log
                file.parent.mkdir(exist_ok=True)
                jsonl.replace(file, {**failure, "memory": memory, "lasting": lasting})
        raise


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return the recorded errors, the first one first."""
    found = [json.loads(file.read_text()) for file in (run_dir / FOLDER).glob(f"*{FAILURE}")]
    return sorted(found, key=lambda one: float(one["time"]))
