"""Plays whole groups: all siblings of a prompt, or a failure with its reason.

The worker (rollout/worker.py) plays every group that the buffer admits through this interface. Where
an extension has other processes that play, each of them uses the class below.

waits for     the episodes (rollout/player.py), which have timeouts
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.images import image_name
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.hooks import Accept, accept_all
from asyncrl.rollout.player import EpisodePlayer
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.routing import share_prompt
from asyncrl.schema import Group, Prompt, Trajectory

ENGINE, LOST = "engine", "process"
"""Reasons of failures in the ledger: no engine answered; every process that played the group was lost."""


class PlaysGroups(Protocol):
    """What the worker needs."""

    async def play(
        self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]
    ) -> tuple[Group, bool | str]:
        """Return the group, and whether it may be trained or the reason why not (rollout.accept). Raises
        EpisodeFailed, which has been reported."""
        ...

    def stop(self, ticket: Ticket, playing: asyncio.Task[None]) -> None:
        """Make `play` end soon, as cancelled or failed. `playing` is the task that waits for it."""
        ...


class GroupPlayer:
    """Plays groups in this process."""

    def __init__(self, player: EpisodePlayer, failures: FailureReporter, accept: Accept = accept_all) -> None:
        self._player, self._failures, self._accept = player, failures, accept

    async def play(
        self, ticket: Ticket, prompt: Prompt, sessions: Sequence[GenerationSession]
    ) -> tuple[Group, bool | str]:
        """Play all siblings and return their group with its verdict. Raises EpisodeFailed."""
        try:
            async with asyncio.TaskGroup() as siblings:  # one failed sibling cancels the rest: no orphaned requests
                tasks = [siblings.create_task(self._player.play(prompt, session)) for session in sessions]
        except BaseExceptionGroup as raised:  # not except*, which wraps what is raised inside it before Python 3.11.4
            failed, others = raised.split((EpisodeFailed, EngineError))
            if others is not None:
                raise others from None
            assert failed is not None
            raise self._told(ticket, failed) from None
        played = [task.result() for task in tasks]
        images, named = _images(prompt, played, sessions), [image_name(png) for png in prompt.images]
        group = Group(ticket.uid, ticket.slot, prompt.token_ids, played, prompt.task, None, named, images)
        group = share_prompt(group)
        return group, self._accept(group)

    def stop(self, ticket: Ticket, playing: asyncio.Task[None]) -> None:
        """Cancel the task."""
        playing.cancel()

    def _told(self, ticket: Ticket, failed: BaseExceptionGroup[AsyncRLError]) -> EpisodeFailed:
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
    found = {image_name(png): png for png in (*prompt.images, *sent)}
    return {name: found[name] for name in sorted(used | {image_name(png) for png in prompt.images})}
