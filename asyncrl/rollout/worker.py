"""The rollout worker, which keeps the engines busy: ticket -> siblings -> scores -> commit.

waits for     the concurrency limit (rollout/limiter.py), a ticket (the buffer's admission)
unblocked by  a published version, and every group that ends; an episode that hangs is given up (rollout/episode.py)
on death      an error that is neither an EpisodeFailed (all that user code raises, and its timeouts) nor an EngineError
              is a bug: it ends the process, and the launcher ends the run
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TypeVar

import msgspec

from asyncrl.engine.client import GenerationClient, GenerationSession
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.rewards.reward import Reward, RewardInput
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.hooks import Accept, accept_all
from asyncrl.rollout.limiter import ConcurrencyLimiter
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.rollout.scoring import Scorer, score_by_branch
from asyncrl.rollout.service import Service
from asyncrl.rollout.teacher import TeacherScorer
from asyncrl.routing import share_prompt
from asyncrl.schema import Group, Prompt, Template, Trajectory, Turn

T = TypeVar("T")
RETRY_DELAY = 0.5
"""Seconds before the first retry; the delay doubles with each further one."""


class Worker:
    """Plays every group that the buffer admits."""

    def __init__(
        self,
        service: Service,
        client: GenerationClient,
        agents: Mapping[str, Agent],
        rewards: Mapping[str, Reward],
        mixer: Mixer,
        template: Template,
        *,
        group_sizes: Mapping[str, int],
        limiter: ConcurrencyLimiter,
        retries: int = 0,
        max_failures: int,
        limits: EpisodeTimeouts,
        failures: FailureReporter,
        accept: Accept = accept_all,
        max_rejections: int = 1000,
        teacher: TeacherScorer | None = None,
    ) -> None:
        """`agents`, `rewards` and `group_sizes` are keyed by task. Agents and rewards serve training and evaluation;
        the teacher scores training episodes only."""
        self._service, self._client, self._agents, self._rewards = service, client, agents, rewards
        self._parts: dict[str, list[float]] = {}
        self._mixer, self._template = mixer, template
        self._group_sizes, self._retries, self._max_failures = group_sizes, retries, max_failures
        self._retried: Counter[str] = Counter()
        self._limits, self._failures, self._scorer = limits, failures, Scorer(limits.reward)
        self._limiter, self._accept, self._max_rejections, self._teacher = limiter, accept, max_rejections, teacher
        self._failures_in_a_row = self._rejections_in_a_row = 0
        self._playing: dict[Ticket, asyncio.Task[None]] = {}
        self._stopped: dict[Ticket, str] = {}

    async def run(self, outstanding: Sequence[tuple[Ticket, Prompt, Sequence[GenerationSession]]] = ()) -> None:
        """Play groups until cancelled; `outstanding` groups, which were running when a checkpoint was saved, come
        first."""
        largest = max(self._group_sizes.values())  # the task is known only once the prompt is drawn
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._stop_the_unwanted())
            for ticket, prompt, sessions in outstanding:
                self._playing[ticket] = groups.create_task(self._play(ticket, prompt, sessions, inside=False))
            while True:
                await self._limiter.acquire(largest)
                ticket = await self._service.ticket()
                prompt = self._service.draw(partial(self._mixer.draw, ticket.born))
                size = self._group_sizes[prompt.task]
                self._limiter.give_back(largest - size)
                sessions = [self._client.generate(group=ticket.uid, sample=f"{ticket.uid} {i}") for i in range(size)]
                self._service.begin(ticket, prompt, sessions)
                self._playing[ticket] = groups.create_task(self._play(ticket, prompt, sessions))

    async def _stop_the_unwanted(self) -> None:
        while True:
            for ticket, reason in await self._service.unwanted():
                self._stopped[ticket] = reason
                self._playing[ticket].cancel()

    async def _play(
        self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession], *, inside: bool = True
    ) -> None:
        """Play one group, unless the buffer aborts it as superfluous. `inside` says that the group is already counted
        by the limit."""
        try:
            if not inside:
                await self._limiter.acquire(len(sessions))
                inside = True
            await self._play_out(ticket, prompt, sessions)
        except asyncio.CancelledError:
            if ticket not in self._stopped:
                raise
            await self._service.reject(ticket, self._stopped.pop(ticket))
        finally:
            del self._playing[ticket]
            if inside:
                self._limiter.release(len(sessions))

    async def _play_out(self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]) -> None:
        """Play all siblings and hand the group in, or reject it so that its slot is replayed with another prompt."""
        try:
            async with asyncio.TaskGroup() as siblings:  # one failed sibling cancels the rest: no orphaned requests
                tasks = [siblings.create_task(self.episode(prompt, session)) for session in sessions]
        except BaseExceptionGroup as raised:  # not except*, which wraps what is raised inside it before Python 3.11.4
            failed, others = raised.split((EpisodeFailed, EngineError))
            if failed is not None:
                await self._fail(ticket, failed)
            if others is not None:
                raise others from None
        else:
            self._failures_in_a_row = 0
            played = [task.result() for task in tasks]
            group = share_prompt(Group(ticket.uid, ticket.slot, prompt.token_ids, played, prompt.task))
            self._mixer.record(group)
            await self._hand_in(ticket, group)

    async def episode(self, prompt: Prompt, session: GenerationSession) -> Trajectory:
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

        async def teach(trajectory: Trajectory) -> list[Turn]:
            assert self._teacher is not None
            return await self._teacher.score(prompt.token_ids, trajectory, session.group)

        taught = teach if self._teacher and session.purpose == "training" else None

        def play() -> Awaitable[Trajectory]:
            session.forget()
            episode = Episode(session, self._limits, self._template)
            return episode.play(self._agents[prompt.task], prompt, lambda one: score_by_branch(one, score), taught)

        return await self._tried(session, play)

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
                session.wait_for(f"another attempt ({failed.reason})")
                await asyncio.sleep(RETRY_DELAY * random.uniform(0.5, 1.0) * 2 ** (self._retries - left))
        raise AssertionError("the last attempt always returns or raises")

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        retried, self._retried = self._retried, Counter()
        parts, self._parts = self._parts, {}
        means = {f"reward/part/{name}": fmean(values) for name, values in sorted(parts.items())}
        return {"episodes/retried": float(retried.total()), **means}

    async def _hand_in(self, ticket: Ticket, group: Group) -> None:
        """Commit a group that `accept` accepts; reject any other, so that its slot is replayed."""
        verdict = self._accept(group)
        if verdict is True:
            self._rejections_in_a_row = 0
            await self._service.commit(ticket, group)
            return
        reason = verdict or "not_accepted"
        await self._service.reject(ticket, reason, group)
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row >= self._max_rejections:
            raise AsyncRLError(
                f"rollout.accept rejected {self._rejections_in_a_row} groups in a row, the last with {reason!r}: the "
                "task is too hard or too easy for the model, or rollout.max_rejections too low"
            )

    async def _fail(self, ticket: Ticket, failed: BaseExceptionGroup[AsyncRLError]) -> None:
        cause = failed.exceptions[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        reason = cause.reason if isinstance(cause, EpisodeFailed) else "engine"
        self._failures.tell(reason, ticket.uid, cause)
        await self._service.reject(ticket, reason)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            raise AsyncRLError(f"{self._failures_in_a_row} groups in a row failed, the last with: {cause}")
