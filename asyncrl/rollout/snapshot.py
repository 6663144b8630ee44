"""Snapshot of the whole rollout side at one instant, as bytes for a checkpoint or the journal (journal.py), and back.

The instant of a checkpoint lies between a publish and the next batch: nothing is in training. Running groups keep their
tickets (and with them cohort, birth version and staleness bound), their prompts, and every token that engines have
generated for them. Afterwards their agents run again from the start; a request that repeats an earlier one gets the
saved answer without an engine (engine/client.py), and an answer that was cut short is continued from its last token. An
agent whose environment is not deterministic makes other requests: its old tokens are then discarded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

import msgspec

from asyncrl import schema
from asyncrl.errors import RecordError
from asyncrl.rollout.buffer import Cohort, CohortBuffer, ReadyGroup, RunningGroup, Ticket
from asyncrl.rollout.events import Published, Saved
from asyncrl.rollout.groups import GroupInPlay, GroupLifecycle, PromptName
from asyncrl.rollout.prompts import Cursor
from asyncrl.schema import Batch, Exchange


@dataclass
class BufferState:
    """Complete state of a buffer."""

    version: int
    next_slot: int
    filling: int
    cohorts: dict[int, Cohort]
    running: list[RunningGroup]
    ready: list[ReadyGroup]
    unwanted: list[Ticket]
    issued: dict[str, int]
    trained: dict[str, int]
    tokens: dict[str, int]
    rejected: dict[str, dict[str, int]]
    requeued: int
    lead: int
    wanted_lead: int
    training: dict[int, list[ReadyGroup]] = field(default_factory=dict)  # by step; none in a checkpoint


class ResumableBuffer(CohortBuffer):
    """A buffer whose state can be saved and restored."""

    def state(self) -> BufferState:
        """Return the state. Serialize it immediately: it shares its parts with the buffer."""
        books = self.books
        return BufferState(
            self.version,
            self._next_slot,
            self._filling,
            dict(self._cohorts),
            list(self._running.values()),
            list(self._ready.values()),
            self._unwanted,
            dict(books.issued),
            dict(books.trained),
            dict(books.tokens),
            {reason: dict(units) for reason, units in books.rejected.items()},
            books.requeued,
            self.lead,
            self._wanted_lead,
            dict(self._training),
        )

    def restore(self, state: BufferState) -> None:
        """Restore the state of a buffer with the same settings. The clock of groups that were running starts anew."""
        self.version = state.version
        self._training = dict(state.training)
        complete = [step for step, taken in state.training.items() if len(taken) == self.batch_groups]
        self.step = max([state.version - 1, *complete]) + 1
        self._next_slot, self._filling = state.next_slot, state.filling
        self._cohorts = dict(state.cohorts)
        self.lead = state.lead
        self._wanted_lead = state.wanted_lead
        self._running = {one.ticket.slot: replace(one, since=self._clock()) for one in state.running}
        self._ready = {one.group.slot: one for one in state.ready}
        self._ready_of = Counter(one.cohort for one in state.ready)
        self._unwanted = state.unwanted
        self.books.restore(state)


@dataclass(frozen=True)
class SiblingSnapshot:
    """One episode of a running group."""

    received: int  # tokens
    said: list[Exchange]


@dataclass(frozen=True)
class Outstanding:
    """A running group."""

    ticket: Ticket
    prompt: PromptName
    siblings: list[SiblingSnapshot]


@dataclass(frozen=True)
class PartState:
    """A part of a batch that is in training."""

    groups: int
    figures: dict[str, int | float]
    last: bool


@dataclass(frozen=True)
class GroupsState:
    """State of all groups."""

    buffer: BufferState
    outstanding: list[Outstanding]
    drawn: int  # prompts
    samples: int  # trajectories that were committed since the last batch
    retried: dict[str, int]
    reported: dict[str, int]  # tokens already reported in the figures of batches
    tokens: dict[str, int]  # received, by purpose
    late: int  # of these, for groups that had ended
    parts: dict[int, list[PartState]] = field(default_factory=dict)  # of the batches in training, by version


@dataclass(frozen=True)
class Snapshot:
    """State of the whole rollout side."""

    service: GroupsState
    cursor: Cursor
    extensions: dict[str, bytes]  # states of those that have one, by name
    evaluating: bool  # an evaluation was running; it starts over
    evaluated: int | None = None  # the version at which the last evaluation began
    number: int = 0  # of a snapshot in the journal


class ResumableGroups(GroupLifecycle):
    """Groups of a run that can be resumed: their state, and what goes on from it."""

    _buffer: ResumableBuffer

    def between_batches(self, version: int) -> bool:
        """Return whether this version is published and its batch not begun: the moment of a checkpoint."""
        return (self._buffer.version, self._buffer.step) == (version, version) and not self._parts

    async def saved(self, version: int, number: int = 0) -> None:
        """Record that the state was saved, with this number if it is for the journal. Wait until this event and all
        before it would survive the death of the process."""
        self.tell(Saved(version, number))
        await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        for hooks in self._hooks:
            hooks.flush()

    def state(self) -> GroupsState:
        """Return the state. Serialize it immediately: it shares its parts with this object."""
        flight = self._client.inflight
        outstanding = [
            Outstanding(ticket, group.prompt, [SiblingSnapshot(one.received, one.said()) for one in group.siblings])
            for ticket, group in self._playing.items()
        ]
        return GroupsState(
            self._buffer.state(),
            outstanding,
            self._drawn,
            self._samples,
            dict(self._retried),
            dict(self._tokens_reported),
            dict(flight.tokens),
            flight.late_tokens,
            {
                version: [PartState(len(part.groups), part.rollout, part.last) for part in parts]
                for version, parts in self._parts.items()
            },
        )

    def restore(self, state: GroupsState) -> list[GroupInPlay]:
        """Restore a saved state, before anything has begun. Returns the groups that must be continued."""
        self._buffer.restore(state.buffer)
        self._client.inflight.restore(state.buffer.version, state.tokens, state.late)
        self._drawn = state.drawn
        self._samples = state.samples
        self._retried, self._tokens_reported = Counter(state.retried), Counter(state.reported)
        for one in state.outstanding:
            uid = one.ticket.uid
            sessions = []
            for number, sibling in enumerate(one.siblings):
                sessions.append(self._client.generate(group=uid, sample=f"{uid} {number}", born=one.ticket.born))
                sessions[-1].restore(sibling.received, sibling.said)
            self._playing[one.ticket] = GroupInPlay(one.ticket, one.prompt, sessions)
        for version, parts in state.parts.items():
            taken = (played.group for played in state.buffer.training[version])
            self._parts[version] = [
                Batch(version, list(islice(taken, part.groups)), part.figures, part.last) for part in parts
            ]
        self.ledger()
        return self.running()

    def go_on(self, served: int, *, held: bool) -> range:
        """Continue in a process that was started again, while the engines serve a version. Unless requests were held
        back, nobody else says that it is served. Returns the versions since that of the state."""
        since = range(self._buffer.version + 1, served + 1)
        for version in since:
            self._buffer.publish(version)
            self._parts.pop(version - 1, None)
            self.tell(Published(version, time.time(), asdict(self.ledger())))
        if held:
            self._client.inflight.hold()
        else:
            self._client.inflight.release(self._buffer.version)
            self._released.set()
        return since


def encode(snapshot: Snapshot) -> bytes:
    """Encode a snapshot as msgpack."""
    return schema.encode(snapshot)


def decode(data: bytes) -> Snapshot:
    """Decode a snapshot. Raises RecordError for anything that `encode` did not produce."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except (msgspec.DecodeError, ValueError) as error:
        problem = "the rollout side of the checkpoint is damaged, or was written by another version of asyncrl"
        raise RecordError(f"{problem}: {error}. That version can resume it.") from None
    state = snapshot.service
    if {one.ticket for one in state.buffer.running} != {one.ticket for one in state.outstanding}:
        raise RecordError("the rollout side of the checkpoint is damaged: its groups are not those of its tickets")
    return snapshot
