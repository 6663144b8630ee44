"""An episode that another process plays, and the connection to that process, as the rollout process sees them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from asyncrl.engine.adapters import InUse
from asyncrl.engine.partial_completion import Purpose
from asyncrl.errors import EpisodeFailed
from asyncrl.observability.intervals import AGENT, WAITING, Activity, Interval, Ongoing
from asyncrl.rollout import wire


class RemoteActivity(Activity):
    """What an episode in another process does, as that was reported last."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        super().__init__()
        self._intervals: list[Interval] = []

    def reported(self, told: wire.RunningEpisode) -> None:
        """Take what a report says."""
        self.since = time.monotonic() - told.silent
        self.open = [Ongoing(told.phase, 0.0, told.name)] if told.phase not in (AGENT, WAITING) else []
        if told.phase == WAITING:
            self.finish()

    def over(self, told: wire.EndedEpisode) -> None:
        """Take what a finished episode did."""
        self.began, self._intervals, self.open = told.began, told.intervals, []
        self.finish()

    def intervals(self, until: float) -> list[Interval]:
        """Return all intervals; none before the episode has ended."""
        return self._intervals


class RemoteSession:
    """An episode that another process plays."""

    def __init__(
        self,
        group: str,
        sample: wire.SampleToPlay,
        born: int,
        *,
        purpose: Purpose = "training",
        adapter: int | None = None,
    ) -> None:
        self.group, self._sample, self.born, self.purpose, self.adapter = group, sample, born, purpose, adapter
        self.received, self._said = sample.received, cast(Any, sample.said)
        self.activity = RemoteActivity()

    @property
    def waits_for(self) -> str:
        """What it is waiting for; "" once it has ended."""
        return self.activity.waits_for

    @property
    def since(self) -> float:
        """Time of the last activity (time.monotonic)."""
        return self.activity.since

    def said(self) -> Any:
        """Return its completions, as of the last time they were asked for."""
        return self._said

    def keep(self, said: msgspec.Raw) -> None:
        """Take its completions."""
        self._said = said

    def close(self) -> int:
        """Return the number of tokens received."""
        return self.received

    def sample(self) -> wire.SampleToPlay:
        """Return what the process needs to play it."""
        return self._sample


class WorkerConnection:
    """One process, its running groups, and what it has counted."""

    def __init__(self, number: int, channel: wire.Channel) -> None:
        self.number, self.channel, self.ready = number, channel, False
        self.groups: dict[str, tuple[Sequence[RemoteSession], asyncio.Future[Any]]] = {}
        self.pending: dict[int, type] = {}
        self.episodes = 0
        self.tokens, self.late, self.proxies = Counter[str](), 0, Counter[str]()
        self.busy = 0.0
        self.in_use = InUse([], {})

    def begin(self, play: wire.Play, sessions: Sequence[RemoteSession]) -> asyncio.Future[Any]:
        """Send a group, and return the future of its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.groups[play.group] = sessions, future
        self.episodes += len(sessions)
        self.channel.send(play)
        return future

    def ended(self, answer: wire.Finished | wire.Answered | wire.Failed) -> None:
        """Settle a group. Its tokens since the last report are counted on both sides."""
        sessions, future = self.groups.pop(answer.group)
        self.episodes -= len(sessions)
        for session, told in zip(sessions, answer.episodes, strict=True):
            if session.purpose == "training":
                self.tokens["training"] += told.received - session.received
            session.received = told.received
            session.activity.over(told)
        if not future.done():
            future.set_result(answer)

    def report(self, told: wire.Report) -> None:
        """Take the counts of a report, and the state of the running groups."""
        self.tokens, self.late, self.in_use = Counter(told.counts.tokens), told.counts.late, told.in_use
        self.proxies = Counter(told.counts.proxies)  # type: ignore[assignment]
        for group, episodes in told.running.items():
            said = told.said.get(group)
            for number, (session, one) in enumerate(zip(self.groups[group][0], episodes, strict=True)):
                session.received = one.received
                session.activity.reported(one)
                if said:
                    session.keep(said[number])

    def lost(self, error: EpisodeFailed) -> None:
        """Fail all groups."""
        for _, future in self.groups.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # the worker that waits for it may be gone
        self.groups = {}
        self.channel.close()
