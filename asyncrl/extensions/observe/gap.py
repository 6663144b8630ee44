"""A warning when the mismatch between the log-probabilities of engines and trainer grows."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.schema import Batch

WINDOW = 20
"""Number of steps in the moving average."""
FACTOR = 3.0
FLOOR = 0.02
"""Lower bound of the baseline, in nats: a gap below FLOOR times FACTOR is never reported, however small the gap of the
first steps was."""


class GapWatch:
    """Listener of step records that warns when the moving average of the gap exceeds FACTOR times its first value, and
    again each time it has grown by FACTOR since the last warning."""

    def __init__(self, warn: Callable[[str, int], None]) -> None:
        self._warn, self._recent = warn, deque[float](maxlen=WINDOW)
        self._usual: float | None = None

    def write(self, record: Mapping[str, Any], batch: Batch) -> None:
        """Process one step. Steps that trained nothing, or what no engine wrote, have no gap and are ignored."""
        if not record.get("tokens/trained") or "logprob_gap/mean" not in record:
            return
        self._recent.append(record["logprob_gap/mean"])
        if len(self._recent) < WINDOW:
            return
        mean = statistics.fmean(self._recent)
        if self._usual is None:
            self._usual = max(mean, FLOOR)
        elif mean > FACTOR * self._usual:
            self._warn(
                f"the log-probabilities of engine and trainer are {mean:.3f} nats apart (mean of {WINDOW} steps), "
                f"{mean / self._usual:.1f} times the usual value. Compare logprob_gap/lag0, which is numerics alone, "
                "with the greater lags, which are staleness: lower rollout.max_staleness or trainer.optimizer.lr, or "
                "set a correction (algo.correction, algo.mask).",
                record["version"],
            )
            self._usual = mean

    def close(self) -> bool:
        """Nothing runs any longer."""
        return True
