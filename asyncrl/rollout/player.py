"""Plays whole groups, all siblings of a prompt, and single episodes, for training and evaluation; retries what may be
transient. Where an extension has other processes that play, each of them uses these classes.

waits for     the episode (rollout/episode.py), which has timeouts; RETRY_DELAY before another attempt
on a hang     the episode's timeouts end it
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import fsum
from typing import Protocol, TypeVar

import msgspec

from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.extension import PlayerHooks
from asyncrl.images import image_name
from asyncrl.observability.intervals import RETRY
from asyncrl.retries import pause
from asyncrl.rewards.reward import Reward, RewardInput, Scorer, score_by_branch
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.episode import Annotate, Episode, EpisodeTimeouts
from asyncrl.rollout.evaluation import Attempt
from asyncrl.rollout.hooks import Accept, accept_all
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.schema import Group, Prompt, Template, Trajectory

Sums = dict[str, tuple[float, float]]
"""Figures that add up over processes: by name, a sum and the number of its terms, or 0 if the sum itself is wanted."""
T = TypeVar("T")
RETRY_DELAY = 0.5
"""Seconds before the first retry; the delay doubles with each further one."""
ENGINE, LOST = "engine", "process"
"""Reasons of failures in the ledger: no engine answered; every process that played the group was lost."""


class PlaysGroups(Protocol):
    """Plays groups for the worker, and questions for evaluations."""

    async def play(
        self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]
    ) -> tuple[Group, bool | str]:
        """Return the group, and whether it may be trained or the reason why not (rollout.accept). Raises
        EpisodeFailed, which has been reported."""

    def stop(self, ticket: Ticket, playing: asyncio.Task[None]) -> None:
        """Make `play` end soon, as cancelled or failed. `playing` is the task that waits for it."""

    async def attempts(self, prompt: Prompt, sessions: Sequence[GenerationSession]) -> list[Attempt]:
        """Play and score all attempts at a question of an evaluation."""


class GroupPlayer:
    """Plays groups of every task in this process, and the questions of evaluations."""

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
        accept: Accept = accept_all,
    ) -> None:
        """`agents` and `rewards` are keyed by task. The hooks annotate training episodes only."""
        self._agents = agents
        self._rewards = rewards
        self._template = template
        self._timeouts = timeouts
        self._failures = failures
        self._retries = retries
        self._accept = accept
        self._scorer = Scorer(timeouts.reward)
        self._hooks = hooks
        self._annotate = [one.annotate for one in hooks if type(one).annotate is not PlayerHooks.annotate]
        self._retried: Counter[str] = Counter()
        self._parts: dict[str, list[float]] = {}

    async def play(
        self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]
    ) -> tuple[Group, bool | str]:
        """Play all siblings and return their group with its verdict. Raises EpisodeFailed."""
        try:
            async with asyncio.TaskGroup() as siblings:  # one failed sibling cancels the rest: no orphaned requests
                tasks = [siblings.create_task(self.episode(prompt, session)) for session in sessions]
        except BaseExceptionGroup as raised:  # not except*, which wraps what is raised inside it before Python 3.11.4
            failed, others = raised.split((EpisodeFailed, EngineError))
            if others is not None:
                raise others from None
            assert failed is not None
            raise self._reported(ticket, failed) from None
        played = [task.result() for task in tasks]
        group = Group(
            ticket.uid,
            ticket.slot,
            prompt.token_ids,
            played,
            prompt.task,
            prompt_images=[image_name(png) for png in prompt.images],
            images=_images(prompt, played, sessions),
        )
        for hooks in self._hooks:
            group = hooks.played(group)
        verdict = self._accept(group)
        return group, verdict if isinstance(verdict, str) else bool(verdict)  # also numpy's

    def stop(self, ticket: Ticket, playing: asyncio.Task[None]) -> None:
        """Cancel the task."""
        playing.cancel()

    async def attempts(self, prompt: Prompt, sessions: Sequence[GenerationSession]) -> list[Attempt]:
        """Play all attempts at a question. One failed question does not end the run: it is counted."""

        async def attempt(session: GenerationSession) -> Attempt:
            try:
                return await self.episode(prompt, session)
            except (EpisodeFailed, EngineError) as failure:
                return failure

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(attempt(session)) for session in sessions]
        return [task.result() for task in tasks]

    async def episode(self, prompt: Prompt, session: GenerationSession) -> Trajectory:
        """Play and score one episode within its timeouts."""

        async def score(trajectory: Trajectory) -> Trajectory:
            texts = [self._template.decode(turn.completion.token_ids) for turn in trajectory.turns]
            answer, reward = RewardInput(texts[-1], texts, prompt.question, trajectory), self._rewards[prompt.task]
            result = await self._tried(session, lambda: self._scorer.score(reward, answer))
            for name, part in result.parts.items():
                self._parts.setdefault(name, []).append(part)
            turns = list(trajectory.turns)
            for place, more in enumerate(result.turns):
                turns[place] = msgspec.structs.replace(turns[place], reward=turns[place].reward + more)
            return Trajectory(turns, result.reward)

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
                    await pause(self._retries - left, first=RETRY_DELAY, longest=math.inf)
        raise AssertionError("the last attempt always returns or raises")

    def take_sums(self) -> Sums:
        """Return what was counted since the last call."""
        retried, self._retried = self._retried, Counter()
        parts, self._parts = self._parts, {}
        means = {f"reward/part/{name}": (fsum(values), len(values)) for name, values in sorted(parts.items())}
        return {"episodes/retried": (retried.total(), 0), **means}

    def _reported(self, ticket: Ticket, failed: BaseExceptionGroup[AsyncRLError]) -> EpisodeFailed:
        """Report a failure, and return it with its reason."""
        cause = failed.exceptions[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        reason = cause.reason if isinstance(cause, EpisodeFailed) else ENGINE
        self._failures.tell(reason, ticket.uid, cause)
        return cause if isinstance(cause, EpisodeFailed) else EpisodeFailed(ENGINE, str(cause))


def _images(prompt: Prompt, played: Sequence[Trajectory], sessions: Sequence[GenerationSession]) -> dict[str, bytes]:
    """Return every image of a group once, by name."""
    used = {name for one in played for turn in one.turns for name in turn.images}
    sent = (png for session in sessions for request in session.requests for png in request.images) if used else ()
    every = {image_name(png): png for png in (*prompt.images, *sent)}
    return {name: every[name] for name in sorted(used | {image_name(png) for png in prompt.images})}


def means(sums: Sums) -> dict[str, float]:
    """Return the figures, under their names in metrics.jsonl."""
    return {name: value / (weight or 1.0) for name, (value, weight) in sums.items()}
