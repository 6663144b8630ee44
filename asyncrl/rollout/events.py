"""What the buffer is told and decides, as events for extensions, in the order in which they happen.

The structs without groups are also written to recordings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.schema import Group


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The rollout process has started, was resumed, or was started again: the following events happened under this
    configuration."""

    run_id: str
    time: float
    version: int
    config: dict[str, Any]
    number: int = 0  # of the snapshot that it goes on from, if that was in the journal


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The buffer issued a ticket, and this prompt is played for it."""

    slot: int
    born: int
    cohort: int
    prompt: str  # uid
    trajectories: int


@dataclass(frozen=True)
class GroupCommitted:
    """A finished group was handed in, whether or not it gets a seat; engines also generated `discarded` tokens that are
    not in it."""

    slot: int
    group: Group
    discarded: int


@dataclass(frozen=True)
class GroupRejected:
    """A group was rejected, for which engines had generated so many tokens; it has its content if it was played to its
    end."""

    slot: int
    reason: str
    tokens: int
    group: Group | None


class PartTaken(msgspec.Struct, frozen=True, tag="part_taken"):
    """The trainer began with these groups of a batch (trainer.batch_parts); the next `taken` names them again."""

    step: int
    uids: list[str]


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """A batch was composed of these groups, in this order."""

    step: int
    uids: list[str]
    figures: dict[str, float]


class Adjusted(msgspec.Struct, frozen=True, tag="adjusted"):
    """The buffer was asked for another lead."""

    lead: int
    time: float


class Published(msgspec.Struct, frozen=True, tag="published"):
    """Every engine serves this version; the ledger is that of this instant."""

    version: int
    time: float
    ledger: dict[str, Any]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """The state at this instant went into the checkpoint of this version, or with a number into the journal. A later
    `began` may continue from it."""

    version: int
    number: int = 0


Event = Began | Admitted | GroupCommitted | GroupRejected | PartTaken | Taken | Adjusted | Published | Saved
