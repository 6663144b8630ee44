"""How failures are told without flooding.

Anything that an agent, an environment or a reward function raises is a typed failure (errors.raised_by): it costs its
group, with the reason in the ledger, and rollout.max_failures of them in a row end the run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

PER_MINUTE = 10
"""Failures of one reason that are told in a minute; the rest is counted."""


class Faults:
    """Failures on their way to `write`, with the traceback of the user's code."""

    def __init__(self, write: Callable[[str, str | None], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._minutes: dict[str, tuple[float, int]] = {}  # by reason: when it began, how many since

    def tell(self, reason: str, uid: str, error: BaseException) -> None:
        """Of a group that failed."""
        began, told = self._minutes.get(reason, (self._clock(), 0))
        left_out = ""
        if self._clock() - began >= 60.0:
            left_out = f" ({told - PER_MINUTE} more of these were left out)" if told > PER_MINUTE else ""
            began, told = self._clock(), 0
        self._minutes[reason] = (began, told + 1)
        if told < PER_MINUTE:
            cause = error.__cause__
            trace = "".join(traceback.format_exception(cause)) if cause else None
            self._write(f"{uid} failed: {error}{left_out}", trace)
