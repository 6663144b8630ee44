"""The whole rollout side at one instant, as bytes that a checkpoint keeps, and back.

The instant lies between a publish and the batch after it: nothing is in training. Groups that are being played keep
their tickets, and with them cohort, birth and staleness bound, their prompts, and every token that engines have written
for them. In the run that goes on their agents are run again from the start, and asking what they had asked they are
answered what they were answered, without an engine (engine/client.py); what was cut short is continued from its last
token. An agent whose environment does not repeat itself asks something else: then its old tokens are discarded.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from asyncrl.engine.client import Said
from asyncrl.errors import RecordError
from asyncrl.rollout.audit import AuditState
from asyncrl.rollout.cohorts import BufferState, Ticket
from asyncrl.rollout.curriculum import MixerState
from asyncrl.rollout.prompts import Cursor


@dataclass(frozen=True)
class PromptName:
    """Enough to render a prompt again."""

    uid: str
    task: str
    index: int


@dataclass(frozen=True)
class Sibling:
    """One episode of a group that is being played."""

    received: int  # tokens
    said: list[Said]


@dataclass(frozen=True)
class Outstanding:
    """A group that is being played."""

    ticket: Ticket
    prompt: PromptName
    siblings: list[Sibling]


@dataclass(frozen=True)
class ServiceState:
    """What the service knows."""

    buffer: BufferState
    outstanding: list[Outstanding]
    audit: AuditState
    drawn: int  # prompts
    reused: int  # groups that the trainer took again
    rewards: list[float]  # of groups that have ended since the last batch
    retried: dict[str, int]
    reported: dict[str, int]  # tokens, in the figures of batches
    tokens: dict[str, int]  # received, by purpose
    late: int  # of these, for groups that had ended


@dataclass(frozen=True)
class Snapshot:
    """Everything."""

    service: ServiceState
    cursor: Cursor
    mixer: MixerState
    evaluating: bool  # an evaluation was under way; it begins anew


def encode(snapshot: Snapshot) -> bytes:
    """msgpack."""
    return msgspec.msgpack.encode(snapshot)


def decode(data: bytes) -> Snapshot:
    """Raises RecordError for anything that `encode` did not make."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(f"the rollout side of the checkpoint is damaged: {error}") from None
    state = snapshot.service
    if {one.ticket for one in state.buffer.running} != {one.ticket for one in state.outstanding}:
        raise RecordError("the rollout side of the checkpoint is damaged: its groups are not those of its tickets")
    return snapshot
