"""One episode within its time limits: whoever hangs, the agent, its environment or the reward, costs its group alone.

waits for     the agent (agent_timeout between two requests), engines (their own deadlines: engine/client.py), the
              reward (reward_timeout), the teacher (engine/scorer.py), and all of it (episode_timeout)
on a hang     EpisodeFailed with the name of the limit
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncrl.engine.client import Session
from asyncrl.errors import EpisodeFailed
from asyncrl.rollout.activity import AGENT, NOTHING, REWARD, TEACHER
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.faults import raised_by
from asyncrl.types import Completion, Prompt, Trajectory, Turn

Score = Callable[[Trajectory], Awaitable[float]]
Teach = Callable[[Sequence[Turn]], Awaitable[list[Turn]]]
"""What adds the teacher's log-probabilities to the turns."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    agent: float  # without a request
    reward: float
    episode: float | None


class Episode:
    """The policy as the agent of one episode sees it, with an eye on the clock."""

    def __init__(self, session: Session, limits: Limits) -> None:
        self._session, self._limits = session, limits
        self._asking = 0
        self._silence: asyncio.Timeout | None = None

    async def __call__(self, token_ids: list[int]) -> Completion:
        """Continue exactly these tokens. While an engine answers, the agent is not silent."""
        self._asking += 1
        self._rest()
        try:
            return await self._session(token_ids)
        finally:
            self._asking -= 1
            self._rest()

    async def play(self, agent: Agent, prompt: Prompt, score: Score, teach: Teach | None = None) -> Trajectory:
        """Play and score, by the teacher at the same time. Raises EpisodeFailed, or the EngineError that the agent let
        through."""
        async with _within(self._limits.episode, "episode_timeout", "it has not ended"):
            async with _within(self._limits.agent, "agent_timeout", "its agent has asked for nothing") as self._silence:
                try:
                    self._rest()
                    with raised_by("agent_error"):
                        trajectory = await agent.run(prompt, self)
                        _check(trajectory, self._session.received)
                finally:
                    self._silence = None  # requests that it left under way may end later
            taught = asyncio.ensure_future(teach(trajectory.turns)) if teach else None
            try:
                self._session.wait_for(REWARD)
                reward = await score(trajectory)
                self._session.wait_for(TEACHER)
                turns = await taught if taught else trajectory.turns
            finally:
                if taught and not taught.cancel() and not taught.cancelled():
                    taught.exception()  # whoever raised first is heard
            self._session.wait_for(NOTHING)
            return Trajectory(turns, reward)

    def _rest(self) -> None:
        """The agent's time runs while nothing is asked of an engine."""
        if not self._asking:
            self._session.wait_for(AGENT)
        if self._silence and not self._silence.expired():
            end = asyncio.get_running_loop().time() + self._limits.agent
            self._silence.reschedule(None if self._asking else end)


def _check(trajectory: Trajectory, received: int) -> None:
    """Token in, token out: an agent returns what engines wrote, and nothing else."""
    if not trajectory.turns:
        raise ValueError("a trajectory without a turn")
    if trajectory.num_tokens > received:
        raise ValueError(f"a trajectory of {trajectory.num_tokens} tokens, of which engines wrote {received}")


@asynccontextmanager
async def _within(seconds: float | None, reason: str, detail: str) -> AsyncIterator[asyncio.Timeout]:
    """asyncio.timeout, whose end is an EpisodeFailed; what a user's code raises is one already."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError:
        raise EpisodeFailed(reason, f"{detail} for {seconds:.0f} s (rollout.{reason})") from None
