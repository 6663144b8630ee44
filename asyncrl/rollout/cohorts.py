"""The buffer's records: tickets, the groups that play for them, and the cohorts in which groups are admitted."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.schema import Group


@dataclass(frozen=True)
class Ticket:
    """Permission to play one group: its slot, and how many groups were played for that slot before."""

    slot: int
    attempt: int
    born: int  # version served by the fleet when the ticket was issued
    cohort: int = 0

    @property
    def uid(self) -> str:
        """Group uid of fixed width: no request id may be a prefix of another, because engines abort by prefix."""
        return f"g{self.slot:08d}a{self.attempt:04d}"


@dataclass
class RunningGroup:
    """A running group."""

    ticket: Ticket
    since: float
    prompt: str = ""  # its uid, once it is drawn
    trajectories: int = 0


@dataclass(frozen=True)
class ReadyGroup:
    """A finished group that waits for its batch or is in it."""

    cohort: int
    prompt: str
    group: Group
    tokens: int

    @property
    def trajectories(self) -> int:
        return len(self.group.lengths)


@dataclass
class Cohort:
    """Groups that are admitted together."""

    seats: int  # number of its groups that will be trained
    due: int  # step that takes what is left of it
    issued: int = 0  # slots issued so far
    playing: int = 0
    vacant: int = 0  # rejected slots, to be replayed
    taken: int = 0  # seats of groups that are ready, in training or trained


@dataclass
class BufferState:
    """Complete state of a buffer between a publish and the next batch."""

    version: int
    next_slot: int
    filling: int
    cohorts: dict[int, Cohort]
    vacant: list[tuple[int, int, int]]
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
