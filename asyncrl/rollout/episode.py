"""One episode with its timeouts: an agent or environment that hangs costs its own group only.

waits for     the agent (agent_timeout between two requests), engines (their own deadlines: engine/client.py), the
              reward (rewards/reward.py), hooks of extensions (PlayerHooks.annotate); the whole episode has
              episode_timeout
on a hang     EpisodeFailed with the name of the timeout
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.agents.linking import check, link
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import EpisodeFailed, raised_by
from asyncrl.images import image_name
from asyncrl.observability.intervals import CURRENT, REWARD
from asyncrl.rollout.agent import Agent, AgentRequest, Played
from asyncrl.schema import Completion, Exchange, Message, Prompt, Template, Trajectory, number

Scoring = Callable[[Trajectory], Awaitable[Trajectory]]
"""Adds the reward to a trajectory whose agent gave none."""
Annotate = Callable[[Trajectory], Awaitable[list[dict[str, Any]]]]
"""Returns fields that change in each turn (PlayerHooks.annotate)."""


@dataclass(frozen=True)
class EpisodeTimeouts:
    """Timeouts of an episode, in seconds."""

    agent: float  # between two requests
    reward: float
    episode: float | None


class Episode:
    """The policy as the agent of one episode sees it (`generate`), with the episode's timeouts."""

    def __init__(self, session: GenerationSession, limits: EpisodeTimeouts, template: Template) -> None:
        self.template = template
        self.temperature = session.trained_at
        self._session, self._limits, self._loop = session, limits, asyncio.get_running_loop()
        self._asking = 0
        self._silence: asyncio.Timeout | None = None
        self._serial = itertools.count()
        self._asked: dict[int, Exchange] = {}  # answered requests, numbered in the order in which they were made

    async def __call__(
        self,
        token_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
        stop: Sequence[str] = (),
    ) -> Completion:
        """Generate a continuation of exactly these tokens. The agent's timeout is suspended while an engine answers."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("in another event loop, call asyncio.run_coroutine_threadsafe(generate(ids), loop)")
        given = {"token_ids": token_ids, "max_new_tokens": max_new_tokens, "role": role, "stop": stop}
        asked = msgspec.convert(given, AgentRequest)  # the agent's mistakes are raised in the agent
        self._asking += 1
        number, context = next(self._serial), asked.token_ids
        self._rest()
        try:
            completion = await self._session(context, asked.max_new_tokens, role, images, asked.stop)
        finally:
            self._asking -= 1
            self._rest()
        self._asked[number] = Exchange(context, completion, role, [image_name(png) for png in images])
        return completion

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the images of messages in order, as the model reads them. Raises ImageRefused."""
        return await self._session.images(messages)

    async def play(self, agent: Agent, prompt: Prompt, score: Scoring, annotate: Sequence[Annotate] = ()) -> Trajectory:
        """Play the episode, then score it while extensions annotate it. Raises EpisodeFailed, or the EngineError that
        the agent let through."""
        CURRENT.set(self._session.activity)
        async with _within(self._limits.episode, "episode_timeout", "the episode did not end"):
            async with _within(self._limits.agent, "agent_timeout", "the agent made no request") as self._silence:
                try:
                    self._rest()
                    with raised_by("agent_error"):
                        trajectory = self._trajectory(await agent.run(prompt.copy(), self), prompt)
                finally:
                    self._silence = None  # requests that it left in flight may end later
            annotated = [asyncio.ensure_future(one(trajectory)) for one in annotate]
            try:
                scored = trajectory if trajectory.reward is not None else await self._scored(score, trajectory, prompt)
                turns = scored.turns
                for one in annotated:
                    changes = zip(turns, await one, strict=True)
                    turns = [msgspec.structs.replace(turn, **fields) for turn, fields in changes]
            finally:
                for one in annotated:
                    if not one.cancel() and not one.cancelled():
                        one.exception()  # mark as retrieved: the error raised first propagates
            self._session.activity.finish()
            return Trajectory(turns, scored.reward)

    async def _scored(self, score: Scoring, trajectory: Trajectory, prompt: Prompt) -> Trajectory:
        with self._session.activity.spent(REWARD, prompt.task):
            return await score(trajectory)

    def _trajectory(self, played: Played, prompt: Prompt) -> Trajectory:
        """Build the trajectory from the agent's result and its requests. Raises ValueError if they do not agree."""
        asked = [one for _, one in sorted(self._asked.items())]
        if any(len(one.completion.token_ids) != len(one.completion.logprobs) for one in asked):
            raise ValueError("the agent changed the list of tokens of an answer: it must change a copy")
        images = [image_name(png) for png in prompt.images]
        if isinstance(played, Trajectory):
            check(played, prompt.token_ids, asked, images)
            trajectory = _plain(played)
        elif asked:
            reward = None if played is None else number(played, "its reward")
            trajectory = Trajectory(link(prompt.token_ids, asked, images), reward)
        else:
            raise ValueError("the agent made no request to the model")
        trajectory = self._trained(trajectory)
        if not trajectory.num_tokens:
            detail = "the model's context has no room for an answer to the agent's request"
            raise EpisodeFailed("no_room", detail, retry=False)
        if not math.isfinite(trajectory.total):
            raise ValueError(f"the rewards of the episode add up to {trajectory.total}")
        return trajectory

    def _trained(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory without the turns of roles that past versions play. Raises EpisodeFailed if none is
        left, and ValueError if turns fork, because the number of the turn that they follow would be wrong."""
        turns = [turn for turn in trajectory.turns if self._session.trains(turn.role)]
        if len(turns) == len(trajectory.turns):
            return trajectory
        if not turns:
            raise EpisodeFailed("no_turn", "the episode ended before the first turn of a role that is trained")
        if any(turn.fork is not None for turn in turns):
            raise ValueError("an episode that forks cannot have roles that past versions play (agents.roles.NAME.past)")
        return Trajectory(turns, trajectory.reward)

    def _rest(self) -> None:
        """Restart the agent's timeout if no request is in flight, otherwise suspend it."""
        if self._silence and not self._silence.expired():
            end = asyncio.get_running_loop().time() + self._limits.agent
            self._silence.reschedule(None if self._asking else end)


def _plain(trajectory: Trajectory) -> Trajectory:
    """Convert all rewards to plain Python numbers, which can be serialized. Raises ValueError."""
    turns = [
        msgspec.structs.replace(
            turn,
            reward=number(turn.reward, "the reward of a turn"),
            token_rewards=[number(one, "the reward of a token") for one in turn.token_rewards],
        )
        for turn in trajectory.turns
    ]
    return Trajectory(turns, None if trajectory.reward is None else number(trajectory.reward, "its reward"))


@asynccontextmanager
async def _within(seconds: float | None, reason: str, detail: str) -> AsyncIterator[asyncio.Timeout]:
    """Apply asyncio.timeout, and raise EpisodeFailed on expiry. A TimeoutError of user code is an EpisodeFailed
    already."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError:
        raise EpisodeFailed(reason, f"{detail} within {seconds:.0f} s (rollout.{reason})", retry=False) from None
