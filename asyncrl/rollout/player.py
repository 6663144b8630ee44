"""Plays and scores single episodes, for training and evaluation, and retries what may be transient.

waits for     the episode (rollout/episode.py), which has timeouts; RETRY_DELAY before another attempt
on a hang     the episode's timeouts end it
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import fsum
from typing import TypeVar

import msgspec

from asyncrl.engine.session import GenerationSession
from asyncrl.errors import EpisodeFailed
from asyncrl.extension import PlayerHooks
from asyncrl.observability.intervals import RETRY
from asyncrl.rewards.reward import Reward, RewardInput
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.episode import Annotate, Episode, EpisodeTimeouts
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.rollout.scoring import Scorer, score_by_branch
from asyncrl.schema import Prompt, Template, Trajectory

Sums = dict[str, tuple[float, float]]
"""Figures that add up over processes: by name, a sum and the number of its terms, or 0 if the sum itself is wanted."""
T = TypeVar("T")
RETRY_DELAY = 0.5
"""Seconds before the first retry; the delay doubles with each further one."""


class EpisodePlayer:
    """Plays episodes of every task."""

    def __init__(
        self,
        agents: Mapping[str, Agent],
        rewards: Mapping[str, Reward],
        template: Template,
        timeouts: EpisodeTimeouts,
        failures: FailureReporter,
        *,
        retries: int = 0,
        hooks: Sequence[PlayerHooks] = (),
    ) -> None:
        """`agents` and `rewards` are keyed by task. The hooks annotate training episodes only."""
        self._agents, self._rewards, self._template = agents, rewards, template
        self._timeouts, self._failures, self._retries = timeouts, failures, retries
        self._scorer = Scorer(timeouts.reward)
        self._annotate = [one.annotate for one in hooks if type(one).annotate is not PlayerHooks.annotate]
        self._retried: Counter[str] = Counter()
        self._parts: dict[str, list[float]] = {}

    async def play(self, prompt: Prompt, session: GenerationSession) -> Trajectory:
        """Play and score one episode within its timeouts."""

        async def score(trajectory: Trajectory) -> Trajectory:
            texts = [self._template.decode(turn.completion.token_ids) for turn in trajectory.turns]
            answer, reward = RewardInput(texts[-1], texts, prompt.question, trajectory), self._rewards[prompt.task]
            found = await self._tried(session, lambda: self._scorer.score(reward, answer))
            for name, part in found.parts.items():
                self._parts.setdefault(name, []).append(part)
            turns = list(trajectory.turns)
            for place, more in enumerate(found.turns):
                turns[place] = msgspec.structs.replace(turns[place], reward=turns[place].reward + more)
            return Trajectory(turns, found.reward)

        annotate: list[Annotate] = []
        if session.purpose == "training":
            annotate = [partial(one, prompt, group=session.group) for one in self._annotate]

        def once() -> Awaitable[Trajectory]:
            session.forget()
            episode = Episode(session, self._timeouts, self._template)
            return episode.play(self._agents[prompt.task], prompt, lambda one: score_by_branch(one, score), annotate)

        return await self._tried(session, once)

    async def _tried(self, session: GenerationSession, act: Callable[[], Awaitable[T]]) -> T:
        """Run `act`, and retry it up to `retries` times after a failure that may be transient."""
        for left in range(self._retries, -1, -1):
            try:
                return await act()
            except EpisodeFailed as failed:
                if not (failed.retry and left):
                    raise
                self._retried[failed.reason] += 1
                self._failures.tell(failed.reason, f"{session.group}, which is retried,", failed)
                with session.activity.spent(RETRY, failed.reason):
                    await asyncio.sleep(RETRY_DELAY * random.uniform(0.5, 1.0) * 2 ** (self._retries - left))
        raise AssertionError("the last attempt always returns or raises")

    def take_sums(self) -> Sums:
        """Return what was counted since the last call."""
        retried, self._retried = self._retried, Counter()
        parts, self._parts = self._parts, {}
        means = {f"reward/part/{name}": (fsum(values), len(values)) for name, values in sorted(parts.items())}
        return {"episodes/retried": (retried.total(), 0), **means}


def add(sums: Sums, more: Sums) -> None:
    """Add what another process counted."""
    for name, (value, weight) in more.items():
        before, weighed = sums.get(name, (0.0, 0.0))
        sums[name] = before + value, weighed + weight


def means(sums: Sums) -> dict[str, float]:
    """Return the figures, under their names in metrics.jsonl."""
    return {name: value / (weight or 1.0) for name, (value, weight) in sums.items()}
