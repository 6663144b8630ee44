"""Hand-made stand-ins: an episode's answer, and rewards that say what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.rewards import RewardInput
from asyncrl.schema import Completion, Trajectory, Turn, VersionSpan


def answer(*texts: str, messages: Sequence[Mapping[str, Any]] = (), **record: Any) -> RewardInput:
    """Return the input of a reward: an episode with these completions, for a row of a file."""
    turns = [Turn([], Completion([place], [-0.5], [VersionSpan(0, 0, 1)], "stop")) for place in range(len(texts))]
    return RewardInput(texts[-1], texts, {**record, "messages": list(messages)}, Trajectory(turns))


class Fixed:
    """Says always the same, or raises it; counts what is asked, begun, ended and closed."""

    def __init__(self, says: Any, inline: bool = True, pure: bool = True) -> None:
        self.says, self.inline, self.pure = says, inline, pure
        self.asked = 0
        self.closed = False

    def __call__(self, one: RewardInput) -> Any:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says(one) if callable(self.says) else self.says

    async def close(self) -> None:
        self.closed = True


class Later(Fixed):
    """The same, async; waits for `until` first."""

    def __init__(self, says: Any, until: asyncio.Event | None = None) -> None:
        super().__init__(says)
        self.until = until
        self.begun = self.cancelled = 0
        self.beginning = asyncio.Semaphore(0)  # once for each that has begun

    def __call__(self, one: RewardInput) -> Any:
        self.asked += 1
        return self._later(one)

    async def _later(self, one: RewardInput) -> Any:
        self.begun += 1
        self.beginning.release()
        try:
            if self.until:
                await self.until.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.asked -= 1
        return super().__call__(one)
