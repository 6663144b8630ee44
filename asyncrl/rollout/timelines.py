"""The timelines of groups, batches and publishes, as the rollout process sees them (observability/timeline.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from asyncrl.engine.session import GenerationSession
from asyncrl.observability.timeline import (
    ROLLOUT,
    BatchTimeline,
    EpisodeTimeline,
    GroupTimeline,
    ProcessSpan,
    PublishTimeline,
    Record,
)
from asyncrl.rollout.buffer import Ticket
from asyncrl.schema import Prompt, Trajectory

COMMITTED = "committed"


class Timelines:
    """Composes the record of everything that ends, and passes it to the listeners. None of them may block or raise."""

    def __init__(self, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self._listeners = listeners
        self._composing = self._listening = 0.0  # CPU seconds so far
        self._reported = (0.0, 0.0)
        self._asked: float | None = None
        self._last = ""
        self._version: int | None = None

    def group(
        self,
        ticket: Ticket,
        task: str,
        admitted: float,
        siblings: Sequence[GenerationSession],
        outcome: str,
        rewards: Sequence[float] = (),
    ) -> None:
        """Record a group that was committed, or rejected for a reason; it has rewards if it was played to its end."""
        began, ended = time.thread_time(), time.time()
        episodes = _episodes(siblings, rewards or [None for _ in siblings], ended)
        record = GroupTimeline(
            ticket.uid, ticket.slot, task, "training", ticket.born, admitted, ended, outcome, episodes
        )
        if outcome == COMMITTED:
            self._last = ticket.uid
        self._tell(record, began)

    def evaluated(
        self, uid: str, prompt: Prompt, sessions: Sequence[GenerationSession], played: Sequence[Trajectory | Exception]
    ) -> None:
        """Record all attempts at a question of an evaluation."""
        began, ended = time.thread_time(), time.time()
        rewards = [one.total if isinstance(one, Trajectory) else None for one in played]
        admitted, born = sessions[0].activity.began, sessions[0].born
        episodes = _episodes(sessions, rewards, ended)
        outcome = COMMITTED if None not in rewards else "failed"
        record = GroupTimeline(uid, -1, prompt.task, "evaluation", born, admitted, ended, outcome, episodes)
        self._tell(record, began)

    def asked(self) -> None:
        """Record that the trainer waits for the next batch, or part of one; only the first call for it counts."""
        self._asked = self._asked or time.time()

    def part_taken(self) -> None:
        """Record that the trainer got a part of a batch, which ends its wait. The timeline shows the wait for the last
        part."""
        self._asked = None

    def taken(self, step: int, uids: list[str]) -> None:
        """Record the composition of a batch."""
        began, now = time.thread_time(), time.time()
        self._tell(BatchTimeline(step, self._asked or now, now, uids, self._last if self._asked else ""), began)
        self._asked = None

    def published(self, version: int, held: float) -> None:
        """Record that every engine serves a version. Requests were held back since `held`. Only the first call for a
        version counts: engines that come later get it, too."""
        if version == self._version:
            return
        self._version = version
        began, now = time.thread_time(), time.time()
        self._tell(PublishTimeline(version, held or now, now), began)

    def phase(self, name: str, start: float) -> None:
        """Record a phase of the process that ends now."""
        began, now = time.thread_time(), time.time()
        self._tell(ProcessSpan(ROLLOUT, name, start, now), began)

    def _tell(self, record: Record, began: float) -> None:
        composed = time.thread_time()
        self._composing += composed - began
        for listener in self._listeners:
            listener(record)
        self._listening += time.thread_time() - composed

    def take_figures(self) -> dict[str, float]:
        """Return the CPU seconds of composing records and of the listeners since the last call, under their names in
        metrics.jsonl."""
        now = (self._composing, self._listening)
        timeline, listeners = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        return {"time/timeline": timeline, "time/metrics": listeners}


def _episodes(
    siblings: Sequence[GenerationSession], rewards: Sequence[float | None], ended: float
) -> list[EpisodeTimeline]:
    return [
        EpisodeTimeline(reward, one.received, one.activity.intervals(ended))
        for one, reward in zip(siblings, rewards, strict=True)
    ]
