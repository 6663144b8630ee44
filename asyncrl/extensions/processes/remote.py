"""An episode that another process plays, and the connection to that process, as the rollout process sees them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from asyncrl.engine.served import InUse
from asyncrl.engine.session import Purpose
from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.processes import wire
from asyncrl.observability.intervals import AGENT, WAITING, Interval, waits_for

NOTHING = wire.RunningEpisode(0, AGENT, "", 0.0)
"""What is known of an episode before the first report."""


class RemoteSession:
    """An episode that another process plays, and its own activity: what was reported last. A report only replaces
    `told`, because there may be a hundred thousand of them."""

    __slots__ = ("_said", "born", "ended", "group", "heard", "pinned", "purpose", "received", "sample", "told")

    def __init__(
        self,
        group: str,
        sample: wire.SampleToPlay,
        born: int,
        *,
        purpose: Purpose = "training",
        pinned: int | None = None,
    ) -> None:
        self.group, self.sample, self.born, self.purpose, self.pinned = group, sample, born, purpose, pinned
        self.received, self._said = sample.received, cast(Any, sample.said)
        self.heard = time.monotonic()
        self.told = NOTHING
        self.ended: wire.EndedEpisode | None = None

    def restore(self, received: int, said: Any) -> None:
        """Continue an episode of a saved run (engine/session.py)."""
        self.received, self._said = received, said

    def to_play(self) -> wire.SampleToPlay:
        """Return the episode for the next process: what it has received stays counted, and the completions that are
        known are recalled, as in a resumed run."""
        if self.received == self.sample.received:
            return self.sample
        return wire.SampleToPlay(self.sample.name, self.sample.temperature, self.received, self._said)

    def lost(self) -> None:
        """Record that its process is lost: nothing more is known of it."""
        self.told, self.heard = NOTHING, time.monotonic()

    @property
    def activity(self) -> RemoteSession:
        """What it does."""
        return self

    @property
    def phase(self) -> str:
        """What it does now."""
        return WAITING if self.ended else self.told.phase

    @property
    def waits_for(self) -> str:
        """What it is waiting for; "" once it has ended."""
        phase = self.phase
        return "" if phase == WAITING else "its agent" if phase == AGENT else waits_for(phase, self.told.name)

    @property
    def since(self) -> float:
        """Time of the last activity (time.monotonic)."""
        return self.heard - self.told.silent

    @property
    def began(self) -> float:
        """Time at which the episode began; 0 before it has ended."""
        return self.ended.began if self.ended else 0.0

    def intervals(self, until: float) -> list[Interval]:
        """Return all intervals; none before the episode has ended."""
        return self.ended.intervals if self.ended else []

    def said(self) -> Any:
        """Return its completions, as of the last time they were asked for."""
        return self._said

    def keep(self, said: msgspec.Raw) -> None:
        """Take its completions."""
        self._said = said

    def close(self) -> int:
        """Return the number of tokens received."""
        return self.received


class WorkerConnection:
    """One process, its running groups, and what it has counted."""

    def __init__(self, number: int, channel: wire.Channel) -> None:
        self.number, self.channel, self.ready = number, channel, False
        self.groups: dict[str, tuple[Sequence[RemoteSession], asyncio.Future[Any]]] = {}
        self.pending: dict[int, type] = {}
        self.episodes = 0
        self.tokens, self.late, self.proxies = Counter[str](), 0, Counter[str]()
        self.busy = 0.0
        self.in_use = InUse()

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
            session.received, session.ended = told.received, told
        if not future.done():
            future.set_result(answer)

    def report(self, told: wire.Report) -> None:
        """Take the counts of a report, and the state of the running groups."""
        self.tokens, self.late, self.in_use = Counter(told.counts.tokens), told.counts.late, told.in_use
        self.proxies = Counter(told.counts.proxies)  # type: ignore[assignment]
        now = time.monotonic()
        for group, episodes in told.running.items():
            for session, one in zip(self.groups[group][0], episodes, strict=True):
                session.received, session.told, session.heard = one.received, one, now
        for group, said in told.said.items():
            for session, completions in zip(self.groups[group][0], said, strict=True):
                session.keep(completions)

    def lost(self, error: EpisodeFailed) -> None:
        """Fail all groups."""
        for sessions, future in self.groups.values():
            for session in sessions:
                session.lost()
            if not future.done():
                future.set_exception(error)
                future.exception()  # the worker that waits for it may be gone
        self.groups = {}
        self.channel.close()
