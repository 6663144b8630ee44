"""The rollout worker, which keeps the engines busy: ticket -> siblings -> scores -> commit.

waits for     the concurrency limit (rollout/limiter.py), a ticket (the buffer's admission)
unblocked by  a published version, and every group that ends; an episode that hangs is given up (rollout/episode.py)
on death      an error that is neither an EpisodeFailed (all that user code raises, and its timeouts) nor an EngineError
              is a bug: it ends the process, and the launcher ends the run
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError, EpisodeFailed
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.groups import ConcurrencyLimiter, GroupLifecycle
from asyncrl.rollout.player import LOST, PlaysGroups
from asyncrl.schema import Group, Prompt


class Worker:
    """Plays every group that the buffer admits."""

    def __init__(
        self,
        groups: GroupLifecycle,
        client: GenerationClient,
        player: PlaysGroups,
        draw: Callable[[int], Prompt],
        limiter: ConcurrencyLimiter,
        *,
        group_sizes: Mapping[str, int],
        max_failures: int,
        max_rejections: int,
    ) -> None:
        """`draw` returns the next prompt, while the engines serve a version. `group_sizes` is keyed by task. The run
        ends after so many failed groups in a row, or groups that `accept` rejected."""
        self._groups = groups
        self._client = client
        self._player = player
        self._draw = draw
        self._limiter = limiter
        self._max_failures = max_failures
        self._max_rejections = max_rejections
        self._group_sizes = group_sizes
        self._failures_in_a_row = self._rejections_in_a_row = 0
        self._first_failure: EpisodeFailed | None = None  # of those in a row
        self._playing: dict[Ticket, asyncio.Task[None]] = {}
        self._stopped: dict[Ticket, str] = {}

    async def run(self, outstanding: Sequence[tuple[Ticket, Prompt, Sequence[GenerationSession]]] = ()) -> None:
        """Play groups until cancelled; `outstanding` groups, which were running when a checkpoint was saved, come
        first: the admission of others may wait for theirs."""
        largest = max(self._group_sizes.values())  # the task is known only once the prompt is drawn
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._stop_the_unwanted())
            for ticket, prompt, sessions in outstanding:
                await self._limiter.acquire(len(sessions))
                self._playing[ticket] = groups.create_task(self._play(ticket, prompt, sessions))
            while True:
                await self._limiter.acquire(largest)
                ticket = await self._groups.ticket()
                prompt = self._groups.draw(partial(self._draw, ticket.born))
                size, uid = self._group_sizes[prompt.task], ticket.uid
                self._limiter.give_back(largest - size)
                sessions = [
                    self._client.generate(group=uid, sample=f"{uid} {number}", born=ticket.born)
                    for number in range(size)
                ]
                self._groups.begin(ticket, prompt, sessions)
                self._playing[ticket] = groups.create_task(self._play(ticket, prompt, sessions))

    async def _stop_the_unwanted(self) -> None:
        while True:
            for ticket, reason in await self._groups.unwanted():
                self._stopped[ticket] = reason
                if ticket in self._playing:  # an outstanding group may not have begun
                    self._player.stop(ticket, self._playing[ticket])

    async def _play(self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]) -> None:
        """Play one group, unless the buffer aborts it as superfluous."""
        try:
            if ticket in self._stopped:
                await self._groups.reject(ticket, self._stopped[ticket])
            else:
                await self._play_out(ticket, prompt, sessions)
        except asyncio.CancelledError:
            if ticket not in self._stopped:
                raise
            await self._groups.reject(ticket, self._stopped[ticket])
        finally:
            del self._playing[ticket]
            self._stopped.pop(ticket, None)
            self._limiter.release(len(sessions))

    async def _play_out(self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]) -> None:
        """Play all siblings and hand the group in, or reject it, so that a group of another prompt replaces it."""
        try:
            group, verdict = await self._player.play(ticket, prompt, sessions)
        except EpisodeFailed as failed:
            await self._fail(ticket, failed)
        else:
            self._failures_in_a_row = 0
            self._first_failure = None
            await self._hand_in(ticket, group, verdict)

    async def _hand_in(self, ticket: Ticket, group: Group, verdict: bool | str) -> None:
        """Commit a group that rollout.accept accepted; reject any other, so that another replaces it."""
        if verdict is True:
            self._rejections_in_a_row = 0
            await self._groups.commit(ticket, group)
            return
        reason = verdict or "not_accepted"
        await self._groups.reject(ticket, reason, group)
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row >= self._max_rejections:
            raise AsyncRLError(
                f"rollout.accept rejected {self._rejections_in_a_row} groups in a row, the last with {reason!r}: the "
                "task is too hard or too easy for the model, or rollout.max_rejections is too low"
            )

    async def _fail(self, ticket: Ticket, failed: EpisodeFailed) -> None:
        await self._groups.reject(ticket, self._stopped.get(ticket, failed.reason))
        if failed.reason == LOST or ticket in self._stopped:
            return  # no fault of the group
        self._failures_in_a_row += 1
        first = self._first_failure = self._first_failure or failed
        if self._failures_in_a_row >= self._max_failures:
            text = f"{self._failures_in_a_row} groups in a row failed, the first with: {first}"
            raise AsyncRLError(text if str(first) == str(failed) else f"{text}; the last with: {failed}") from first
