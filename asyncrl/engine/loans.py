"""When trainers lend their GPUs to engines (cluster.lend). Pure."""

from __future__ import annotations

import statistics
from collections import deque

PAYS = 2.0
"""How many times as long as its hand-overs a wait must be for a loan to pay."""
LATEST = 3
"""Number of latest waits and of latest loans from which the next ones are expected."""
TRIALS = 2
"""Number of first loans that measure what one costs. In the first, host memory is allocated for what leaves a GPU."""


class LoanRule:
    """Decides when a wait is long enough for a loan.

    A loan begins at once if the latest waits were long enough for it, and otherwise when this one has lasted so long: a
    wait that then ends was prolonged by at most 1 / PAYS (compare the ski rental problem).
    """

    def __init__(self) -> None:
        self._waits, self._costs = deque[float](maxlen=LATEST), deque[float](maxlen=LATEST)

    def due(self, waited: float) -> bool:
        """Return whether to lend, after so many seconds of waiting."""
        if len(self._costs) < TRIALS:
            return True
        expected = statistics.fmean(self._waits) if len(self._waits) == LATEST else 0.0
        return max(waited, expected) >= PAYS * min(self._costs)

    def ended(self, waited: float, cost: float | None) -> None:
        """Record the seconds of a wait, and those of the hand-overs if there was a loan."""
        self._waits.append(waited)
        if cost is not None:
            self._costs.append(cost)
