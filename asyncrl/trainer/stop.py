"""The rule that decides when a run is finished."""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncrl.config import RunConfig


class StopRule:
    """Stops at a number of steps, of tokens, or at a reward, whichever is reached first. Every rank decides alike,
    because all have the same statistics."""

    def __init__(self, run: RunConfig, end: int | None = None) -> None:
        """Set up the rule. `end` is the version after the last batch, where all are given; then nothing else ends
        the run."""
        self._run = run
        self._end = end
        self._rewards: deque[float] = deque(maxlen=run.reward_window)
        self._tokens = 0.0

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"rewards": list(self._rewards), "tokens": self._tokens}

    def restore(self, counters: dict[str, Any]) -> None:
        """Restore what `counters` returned."""
        self._rewards.extend(counters["rewards"])
        self._tokens = counters["tokens"]

    def reason(self, step: dict[str, float]) -> str | None:
        """Return why the run ends after this step, or None."""
        if self._end is None:
            self._rewards.append(step["reward/mean"])
            self._tokens += step["tokens/generated"]
        return self.at(int(step["step"]))

    def at(self, version: int) -> str | None:
        """Return why the run ends at this version, given the steps so far, or None."""
        if self._end is not None:
            return "every given batch is trained" if version == self._end else None
        mean = sum(self._rewards) / max(1, len(self._rewards))
        run = self._run
        if run.reward_target is not None and len(self._rewards) == run.reward_window and mean >= run.reward_target:
            return f"reward {mean:.3f} over {run.reward_window} steps reached run.reward_target {run.reward_target}"
        if run.token_budget is not None and self._tokens >= run.token_budget:
            return f"{self._tokens:.0f} generated tokens reached run.token_budget {run.token_budget}"
        if version >= run.max_steps:
            return f"run.max_steps {run.max_steps} reached"
        return None
