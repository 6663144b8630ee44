"""Snapshot of the whole rollout side at one instant, as bytes for a checkpoint or the journal (journal.py), and back.

The instant of a checkpoint lies between a publish and the next batch: nothing is in training. Running groups keep their
tickets (and with them cohort, birth version and staleness bound), their prompts, and every token that engines have
generated for them. Afterwards their agents run again from the start; a request that repeats an earlier one gets the
saved answer without an engine (engine/client.py), and an answer that was cut short is continued from its last token. An
agent whose environment is not deterministic makes other requests: its old tokens are then discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from asyncrl import schema
from asyncrl.errors import RecordError
from asyncrl.rollout.buffer import BufferState, Ticket
from asyncrl.rollout.prompts import Cursor
from asyncrl.schema import Exchange


@dataclass(frozen=True)
class PromptName:
    """Enough to render a prompt again."""

    uid: str
    task: str
    index: int


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
