"""The rollout worker, which keeps the engines busy: ticket -> siblings -> scores -> commit.

waits for     the concurrency limit (rollout/limiter.py), a ticket (the buffer's admission)
unblocked by  a published version, and every group that ends; an episode that hangs is given up (rollout/episode.py)
on death      an error that is neither an EpisodeFailed (all that user code raises, and its timeouts) nor an EngineError
              is a bug: it ends the process, and the launcher ends the run
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.images import image_name
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.groups import GroupLifecycle
from asyncrl.rollout.hooks import Accept, accept_all
from asyncrl.rollout.limiter import ConcurrencyLimiter
from asyncrl.rollout.player import EpisodePlayer
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.routing import share_prompt
from asyncrl.schema import Group, Prompt, Trajectory


@dataclass(frozen=True)
class Patience:
    """Maximum numbers of failed and of rejected groups in a row, at which the run ends."""

    max_failures: int
    max_rejections: int = 1000  # by `accept`


class Worker:
    """Plays every group that the buffer admits."""

    def __init__(
        self,
        groups: GroupLifecycle,
        client: GenerationClient,
        player: EpisodePlayer,
        mixer: Mixer,
        limiter: ConcurrencyLimiter,
        failures: FailureReporter,
        patience: Patience,
        *,
        group_sizes: Mapping[str, int],
        accept: Accept = accept_all,
    ) -> None:
        """`group_sizes` is keyed by task."""
        self._groups, self._client, self._player, self._mixer = groups, client, player, mixer
        self._limiter, self._failures, self._patience = limiter, failures, patience
        self._group_sizes, self._accept = group_sizes, accept
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
                ticket = await self._groups.ticket()
                prompt = self._groups.draw(partial(self._mixer.draw, ticket.born))
                size = self._group_sizes[prompt.task]
                self._limiter.give_back(largest - size)
                sessions = [
                    self._client.generate(group=ticket.uid, sample=f"{ticket.uid} {number}", born=ticket.born)
                    for number in range(size)
                ]
                self._groups.begin(ticket, prompt, sessions)
                self._playing[ticket] = groups.create_task(self._play(ticket, prompt, sessions))

    async def _stop_the_unwanted(self) -> None:
        while True:
            for ticket, reason in await self._groups.unwanted():
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
            await self._groups.reject(ticket, self._stopped.pop(ticket))
        finally:
            del self._playing[ticket]
            if inside:
                self._limiter.release(len(sessions))

    async def _play_out(self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]) -> None:
        """Play all siblings and hand the group in, or reject it, so that a group of another prompt replaces it."""
        try:
            async with asyncio.TaskGroup() as siblings:  # one failed sibling cancels the rest: no orphaned requests
                tasks = [siblings.create_task(self._player.play(prompt, session)) for session in sessions]
        except BaseExceptionGroup as raised:  # not except*, which wraps what is raised inside it before Python 3.11.4
            failed, others = raised.split((EpisodeFailed, EngineError))
            if failed is not None:
                await self._fail(ticket, failed)
            if others is not None:
                raise others from None
        else:
            self._failures_in_a_row = 0
            played = [task.result() for task in tasks]
            images = _images(prompt, played, sessions)
            named = [image_name(png) for png in prompt.images]
            group = share_prompt(
                Group(ticket.uid, ticket.slot, prompt.token_ids, played, prompt.task, None, named, images)
            )
            self._mixer.record(group)
            await self._hand_in(ticket, group)

    async def _hand_in(self, ticket: Ticket, group: Group) -> None:
        """Commit a group that `accept` accepts; reject any other, so that another replaces it."""
        verdict = self._accept(group)
        if verdict is True:
            self._rejections_in_a_row = 0
            await self._groups.commit(ticket, group)
            return
        reason = verdict or "not_accepted"
        await self._groups.reject(ticket, reason, group)
        self._rejections_in_a_row += 1
        if self._rejections_in_a_row >= self._patience.max_rejections:
            raise AsyncRLError(
                f"rollout.accept rejected {self._rejections_in_a_row} groups in a row, the last with {reason!r}: the "
                "task is too hard or too easy for the model, or rollout.max_rejections is too low"
            )

    async def _fail(self, ticket: Ticket, failed: BaseExceptionGroup[AsyncRLError]) -> None:
        cause = failed.exceptions[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        reason = cause.reason if isinstance(cause, EpisodeFailed) else "engine"
        self._failures.tell(reason, ticket.uid, cause)
        await self._groups.reject(ticket, reason)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._patience.max_failures:
            raise AsyncRLError(f"{self._failures_in_a_row} groups in a row failed, the last with: {cause}")


def _images(prompt: Prompt, played: Sequence[Trajectory], sessions: Sequence[GenerationSession]) -> dict[str, bytes]:
    """Return every image of a group once, by name."""
    used = {name for one in played for turn in one.turns for name in turn.images}
    sent = (png for session in sessions for exchange in session.exchanges for png in exchange.images) if used else ()
    found = {image_name(png): png for png in (*prompt.images, *sent)}
    return {name: found[name] for name in sorted(used | {image_name(png) for png in prompt.images})}
