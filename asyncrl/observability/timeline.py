"""Records of what episodes and processes of a run did, and when, for the extensions that listen to them.

Times are those of `time.time`, so that processes and machines compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncrl import lookup
from asyncrl.observability.intervals import Interval

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.config import Config

ROLLOUT, LAUNCHER = "rollout", "launcher"
"""Names of processes; trainer ranks are "trainer 0", "trainer 1", ..."""


class EpisodeTimeline(msgspec.Struct, frozen=True, array_like=True):
    """One episode of a group."""

    reward: float | None  # None if it was not scored
    tokens: int  # that engines generated for it
    intervals: list[Interval]


class GroupTimeline(msgspec.Struct, frozen=True, tag="group"):
    """A group that has ended, or the attempts at a question of an evaluation."""

    uid: str
    slot: int  # -1 in an evaluation
    task: str  # or the evaluation set
    purpose: str  # training or evaluation
    born: int  # version when it was admitted
    admitted: float
    ended: float
    outcome: str  # "committed", or the reason of its rejection
    episodes: list[EpisodeTimeline]


class BatchTimeline(msgspec.Struct, frozen=True, tag="batch"):
    """A batch, written when it is taken."""

    step: int
    asked: float  # when the trainer began to wait for it, or for the last of its parts
    taken: float
    uids: list[str]
    last: str = ""  # uid of the group that it waited for last; "" if it was ready


class PublishTimeline(msgspec.Struct, frozen=True, tag="published"):
    """A publish as the rollout process sees it: requests were held back in between."""

    version: int
    held: float
    released: float


class ProcessSpan(msgspec.Struct, frozen=True, tag="span"):
    """A phase of a trainer rank or of the launcher."""

    process: str  # "trainer 0", "launcher", "rollout"
    name: str  # forward, backward, optimizer, gather, publish, checkpoint, restart, ...
    start: float
    end: float
    step: int = -1
    attributes: dict[str, str | float] = {}


@dataclass(frozen=True)
class BatchScores:
    """The log-probabilities of a batch's tokens under the policy that its steps started from, in the order of its
    groups. Rank 0 of the trainers has them."""

    step: int
    logprobs: Tensor  # [N], NaN where none was computed


Record = GroupTimeline | BatchTimeline | PublishTimeline | ProcessSpan | BatchScores


class RecordListener(Protocol):
    """Receives the records of a process. Its methods must neither block nor raise."""

    def record(self, record: Record) -> None:
        """Take the next record."""
        ...

    def close(self) -> None:
        """End, after the last record."""
        ...


class Phases:
    """Tells the extensions of a run what a process does, and when."""

    def __init__(self, config: Config, run_dir: Path, process: str, warn: Callable[[str], None]) -> None:
        self._process = process
        found = (one.phases(config, run_dir, process, warn) for one in lookup.active(config).values())
        self._listeners = [listener for listener in found if listener is not None]

    def __call__(self, name: str, step: int, start: float, end: float, thread: str = "", **attributes: str) -> None:
        """Record a phase of the process, or of one of its threads, which overlaps with those of the others."""
        self.tell(ProcessSpan(f"{self._process} {thread}".rstrip(), name, start, end, step, {**attributes}))

    def tell(self, record: Record) -> None:
        """Tell the listeners of another record."""
        for listener in self._listeners:
            listener.record(record)

    def close(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            listener.close()
