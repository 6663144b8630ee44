"""Reports that the rollout process writes to the run folder: warnings, ledgers, evaluations, and failed episodes.

Anything that an agent, an environment or a reward function raises becomes a typed failure (errors.raised_by). It costs
its group, with the reason in the ledger; rollout.max_failures consecutive failures end the run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl import jsonl
from asyncrl.config import Config
from asyncrl.network.addresses import Addresses
from asyncrl.tasks import Task

PER_MINUTE = 10
"""Maximum number of reports per minute and reason; further failures are only counted."""


class Warn(Protocol):
    """Receives a warning."""

    def __call__(self, text: str, traceback: str | None = None) -> None: ...


@dataclass(frozen=True)
class RolloutRun:
    """The run of a rollout process, who receives its warnings, and its tasks."""

    config: Config
    addresses: Addresses
    run_dir: Path
    warn: Warn
    tasks: Mapping[str, Task] = field(default_factory=dict)  # and evaluation sets, by name


class RunReporter:
    """Writes the report files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.version: Callable[[], int] = lambda: 0
        """Returns the version that the engines serve, once there is a client that knows it."""

    def warn(self, text: str, traceback: str | None = None) -> None:
        """Append a line to warnings.jsonl."""
        line = {"version": self.version(), "warning": text, **({"traceback": traceback} if traceback else {})}
        jsonl.append(self._run_dir / "warnings.jsonl", line)

    def publish(self, ledger: dict[str, Any]) -> None:
        """Replace ledger.json, at every version."""
        jsonl.replace(self._run_dir / "ledger.json", ledger)

    def evaluated(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines of an evaluation to eval.jsonl, all or none."""
        jsonl.append(self._run_dir / "eval.jsonl", *lines)


class FailureReporter:
    """Reports failures to `write`, with the traceback of the user's code."""

    def __init__(self, write: Callable[[str, str | None], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._minutes: dict[str, tuple[float, int]] = {}  # by reason: start of the current minute, failures in it

    def tell(self, reason: str, uid: str, error: BaseException) -> None:
        """Report that the group `uid` failed."""
        began, count = self._minutes.get(reason, (self._clock(), 0))
        left_out = ""
        if self._clock() - began >= 60.0:
            left_out = f" ({count - PER_MINUTE} more of these were left out)" if count > PER_MINUTE else ""
            began, count = self._clock(), 0
        self._minutes[reason] = (began, count + 1)
        if count < PER_MINUTE:
            cause = error.__cause__
            trace = "".join(traceback.format_exception(cause)) if cause else None
            self._write(f"{uid} failed: {error}{left_out}", trace)
