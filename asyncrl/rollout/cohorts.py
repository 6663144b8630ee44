"""What the buffer keeps: tickets, the groups that play for them, and the cohorts in which they are admitted."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.types import Group


@dataclass(frozen=True)
class Ticket:
    """The right to play one group: its slot, and how many groups were played for that slot before."""

    slot: int
    attempt: int
    born: int  # version served by the fleet when the ticket was issued
    cohort: int = 0

    @property
    def uid(self) -> str:
        """Fixed width: no request id may be a prefix of another (engines abort by prefix)."""
        return f"g{self.slot:08d}a{self.attempt:04d}"


@dataclass
class Playing:
    """A group that is being played."""

    ticket: Ticket
    since: float
    prompt: str = ""  # its uid, once it is drawn
    trajectories: int = 0


@dataclass(frozen=True)
class Played:
    """A group that waits for its batch, or is in it."""

    cohort: int
    prompt: str
    group: Group
    tokens: int

    @property
    def trajectories(self) -> int:
        return len(self.group.trajectories)


@dataclass
class Cohort:
    """Groups that are admitted together."""

    seats: int  # groups of it that will be trained
    issued: int = 0  # slots
    playing: int = 0
    vacant: int = 0  # rejected, to be played anew
    taken: int = 0  # seats of groups that are ready, in training or trained


@dataclass
class BufferState:
    """All of a buffer, between a publish and the batch after it."""

    version: int
    next_slot: int
    filling: int
    cohorts: dict[int, Cohort]
    vacant: list[tuple[int, int, int]]
    running: list[Playing]
    ready: list[Played]
    unwanted: list[Ticket]
    issued: dict[str, int]
    trained: dict[str, int]
    tokens: dict[str, int]
    rejected: dict[str, dict[str, int]]
    requeued: int
