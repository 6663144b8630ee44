"""A single turn with a rubric: the reward is the share of digits in the answer."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]


class DigitsTask(vf.Task[vf.TaskData]):
    """Writes digits."""

    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        """Share of digits."""
        said = trace.last_reply or ""
        return sum(character in "0123456789" for character in said) / max(1, len(said))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Number of characters."""
        return float(len(trace.last_reply or ""))


class DigitsConfig(vf.TasksetConfig):
    """Number of tasks, and what their prompts begin with."""

    size: int = 1000
    first: int = 0


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    """Numbers as prompts."""

    def load(self):
        """Yield the tasks."""
        for number in range(self.config.size):
            shown = (self.config.first + number) % 1000
            yield DigitsTask(vf.TaskData(name=f"digits#{number}", prompt=f"{shown:03}"), self.config.task)
