"""When a run has done what it was asked for."""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncrl.config import Run


class StopRule:
    """Steps, tokens or reward, whichever is reached first. Decided from figures that every rank shares."""

    def __init__(self, run: Run, end: int | None = None) -> None:
        """`end`: the version that the last batch of a recording makes; then nothing else ends the run."""
        self._run, self._end = run, end
        self._rewards: deque[float] = deque(maxlen=run.reward_window)
        self._tokens = 0.0

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"rewards": list(self._rewards), "tokens": self._tokens}

    def restore(self, counters: dict[str, Any]) -> None:
        """As `counters` gave them."""
        self._rewards.extend(counters["rewards"])
        self._tokens = counters["tokens"]

    def reason(self, step: dict[str, float]) -> str | None:
        """Why the run ends after this step, or None."""
        if self._end is None:
            self._rewards.append(step["reward/mean"])
            self._tokens += step["tokens/generated"]
        return self.at(int(step["step"]))

    def at(self, version: int) -> str | None:
        """Why the run ends at this version, from the steps so far."""
        if self._end is not None:
            return "every batch of the recording is trained" if version == self._end else None
        mean = sum(self._rewards) / max(1, len(self._rewards))
        run = self._run
        if run.reward_target is not None and len(self._rewards) == run.reward_window and mean >= run.reward_target:
            return f"reward {mean:.3f} over {run.reward_window} steps reached run.reward_target {run.reward_target}"
        if run.token_budget is not None and self._tokens >= run.token_budget:
            return f"{self._tokens:.0f} generated tokens reached run.token_budget {run.token_budget}"
        if version >= run.max_steps:
            return f"run.max_steps {run.max_steps} reached"
        return None
