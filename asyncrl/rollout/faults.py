"""Rate-limited reports of failed episodes.

Anything that an agent, an environment or a reward function raises becomes a typed failure (errors.raised_by). It costs
its group, with the reason in the ledger; rollout.max_failures consecutive failures end the run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

PER_MINUTE = 10
"""Maximum number of reports per minute and reason; further failures are only counted."""


class Faults:
    """Reports failures to `write`, with the traceback of the user's code."""

    def __init__(self, write: Callable[[str, str | None], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._minutes: dict[str, tuple[float, int]] = {}  # by reason: start of the current minute, failures in it

    def tell(self, reason: str, uid: str, error: BaseException) -> None:
        """Report that the group `uid` failed."""
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
