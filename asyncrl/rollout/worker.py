"""Ticket -> siblings -> scores -> commit: what keeps the engines busy.

waits for     a ticket (the buffer's admission), room under max_running_groups
unblocked by  Service.publish, and by every group that ends
on death      an error that is neither an EpisodeFailed nor an EngineError ends the process; the launcher ends the run
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.engine.client import Client, Session
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.hooks import Accept, accept_all
from asyncrl.rollout.service import Service
from asyncrl.tasks import Task
from asyncrl.types import Generate, Group, Prompt, Trajectory


class Worker:
    """Plays every group that the buffer admits."""

    def __init__(
        self,
        service: Service,
        client: Client,
        agent: Agent,
        tasks: Mapping[str, Task],
        mixer: Mixer,
        decode: Callable[[list[int]], str],
        *,
        group_sizes: Mapping[str, int],
        max_running: int | None,
        max_failures: int,
        accept: Accept = accept_all,
        max_rejections: int = 1000,
    ) -> None:
        """`tasks` score the answers to their own prompts, of training and evaluation; `group_sizes` are by task."""
        self._service, self._client, self._agent, self._tasks = service, client, agent, tasks
        self._mixer, self._decode = mixer, decode
        self._group_sizes, self._max_failures = group_sizes, max_failures
        self._room = asyncio.Semaphore(max_running) if max_running else None
        self._accept, self._max_rejections = accept, max_rejections
        self._failures_in_a_row = self._rejections_in_a_row = 0
        self._playing: dict[Ticket, asyncio.Task[None]] = {}
        self._stopped: dict[Ticket, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._stop_the_unwanted())
            while True:
                if self._room:
                    await self._room.acquire()
                ticket = await self._service.ticket()
                self._playing[ticket] = groups.create_task(self._play(ticket, self._mixer.draw(ticket.born)))

    async def _stop_the_unwanted(self) -> None:
        while True:
            for ticket, reason in await self._service.unwanted():
                self._stopped[ticket] = reason
                self._playing[ticket].cancel()

    async def _play(self, ticket: Ticket, prompt: Prompt) -> None:
        """One group, unless the buffer stops it because nobody waits for it any more."""
        sessions = [self._client.generate(group=ticket.uid) for _ in range(self._group_sizes[prompt.task])]
        try:
            await self._play_out(ticket, prompt, sessions)
        except asyncio.CancelledError:
            if ticket not in self._stopped:
                raise
            await self._service.reject(ticket, self._stopped.pop(ticket), _received(sessions))
        finally:
            del self._playing[ticket]
            if self._room:
                self._room.release()

    async def _play_out(self, ticket: Ticket, prompt: Prompt, sessions: list[Session]) -> None:
        """All siblings succeed, or the slot is played anew with another prompt."""
        try:
            async with asyncio.TaskGroup() as siblings:  # one lost sibling cancels the rest: no orphan requests
                tasks = [siblings.create_task(self.episode(prompt, session)) for session in sessions]
        except* (EpisodeFailed, EngineError) as failed:
            await self._fail(ticket, failed, _received(sessions))
        else:
            self._failures_in_a_row = 0
            played = [task.result() for task in tasks]
            group = Group(ticket.uid, ticket.slot, prompt.token_ids, played, prompt.task)
            self._mixer.record(group)
            await self._hand_in(ticket, group, _received(sessions))

    async def episode(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play and score one episode."""
        trajectory = await self._agent.run(prompt, generate)
        answer = self._decode(trajectory.turns[-1].completion.token_ids)
        return Trajectory(trajectory.turns, self._tasks[prompt.task].score(answer, prompt.question))

    async def _hand_in(self, ticket: Ticket, group: Group, received: list[int]) -> None:
        """A group that is accepted waits for its batch; another takes the place of one that is not."""
        verdict = self._accept(group)
        if verdict is True:
            self._rejections_in_a_row = 0
            await self._service.commit(ticket, group, sum(received))
            return
        reason = verdict or "not_accepted"
        await self._service.reject(ticket, reason, received, [t.reward for t in group.trajectories])
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row >= self._max_rejections:
            raise AsyncRLError(
                f"rollout.accept rejected {self._rejections_in_a_row} groups in a row, the last with {reason!r}: the "
                "task is too hard or too easy for the model, or rollout.max_rejections too low"
            )

    async def _fail(self, ticket: Ticket, failed: BaseExceptionGroup[AsyncRLError], received: list[int]) -> None:
        cause = failed.exceptions[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        reason = cause.reason if isinstance(cause, EpisodeFailed) else "engine"
        await self._service.reject(ticket, reason, received)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            raise AsyncRLError(f"{self._failures_in_a_row} groups in a row failed, the last with: {cause}")


def _received(sessions: list[Session]) -> list[int]:
    """Tokens that engines wrote for each sibling."""
    return [session.received for session in sessions]
