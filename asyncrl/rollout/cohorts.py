"""The buffer's records: tickets, the groups that play for them, and the cohorts in which groups are admitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from asyncrl.schema import Group


@dataclass(frozen=True)
class Ticket:
    """Permission to play one group."""

    slot: int
    born: int  # version served by the fleet when the ticket was issued
    cohort: int = 0

    @property
    def uid(self) -> str:
        """Group uid of fixed width: no request id may be a prefix of another, because engines abort by prefix. Seeds of
        answers are derived from it, so that another form would change what a deterministic run generates."""
        return f"g{self.slot:08d}a0000"


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
    taken: int = 0  # seats of groups that are ready, in training or trained


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
    dropped: list[Group] = field(default_factory=list)


@dataclass(frozen=True)
class Demand:
    """What the next step must take, so that every later step can take what is due then."""

    cohort: int
    must: int  # number of groups of cohorts up to this one that it must take
    ready: int  # number of them that are ready


def demands(cohorts: Mapping[int, Cohort], ready: Mapping[int, int], step: int, batch: int) -> list[Demand]:
    """Return the demands of all cohorts on step `step`, of `batch` groups, by the rule of rollout/buffer.py. `ready` is
    the number of ready groups of each cohort that has any."""
    wanted = []
    untrained = 0
    counted = 0
    for number, cohort in sorted(cohorts.items()):
        counted += ready.get(number, 0)
        untrained += cohort.seats - cohort.taken + ready.get(number, 0)
        must = untrained - (cohort.due - step) * batch
        wanted.append(Demand(number, max(0, must) if untrained else 0, counted))
    return wanted


def units(groups: Collection[RunningGroup | ReadyGroup]) -> Counter[str]:
    """Count the prompts, groups and trajectories of these groups; a group that has begun plays one prompt."""
    return Counter(
        prompts=len({group.prompt for group in groups if group.prompt}),
        groups=len(groups),
        trajectories=sum(group.trajectories for group in groups),
    )
