"""A failure of each kind, by the task's name."""

from __future__ import annotations

import asyncio
import os

import verifiers.v1 as vf

__all__ = ["FaultyTaskset"]

HOWS = (
    *("reward is 0", "setup raises", "reward raises", "nan", "setup hangs", "reward hangs", "finalize hangs"),
    *("finalize raises", "worker dies", "agent hangs"),
)


class FaultyData(vf.TaskData):
    """How it fails."""

    how: str


class FaultyTask(vf.Task[FaultyData]):
    """Fails."""

    async def setup(self, runtime: vf.Runtime) -> None:
        """Fail before the first request."""
        if self.data.how == "setup raises":
            raise OSError("no dataset")
        if self.data.how == "worker dies":
            os._exit(9)
        if self.data.how == "setup hangs":
            await asyncio.sleep(1000)

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Fail after the last answer."""
        if self.data.how == "finalize raises":
            raise OSError("no disk")
        if self.data.how == "finalize hangs":
            await asyncio.sleep(1000)

    @vf.reward
    async def mark(self, trace: vf.Trace) -> float:
        """Fail to score."""
        if self.data.how == "reward raises":
            raise ValueError("no judge")
        if self.data.how == "reward hangs":
            await asyncio.sleep(1000)
        return {"nan": float("nan"), "fine": 1.0}.get(self.data.how, 0.0)


class FaultyConfig(vf.TasksetConfig):
    """Number of tasks, and of which each how many-th fails, if not all do."""

    size: int = len(HOWS)
    every: int = 1


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    """One task for each failure, in turn, between tasks with the reward 1."""

    def load(self):
        """Yield the tasks."""
        for number in range(self.config.size):
            turn, rest = divmod(number, self.config.every)
            how = "fine" if rest else HOWS[turn % len(HOWS)]
            yield FaultyTask(
                FaultyData(name=f"{how}#{number}" if rest else how, prompt="012", how=how), self.config.task
            )
