"""Admission and bounded staleness: the only state shared between rollouts and trainer.

The cohort rule. Groups are admitted cohort by cohort, B groups (one batch) each; v is the version that the whole fleet
serves, `lead` <= `max_staleness`, slack = max_staleness - lead.

  admit   groups of cohort c are admitted while c <= lead + v
  take    step t takes the lowest ready slots, B groups in total. It waits until B are ready and, for every cohort, at
          most (due - t) * B groups of cohorts up to it are left afterwards; cohort c is due at step c + slack. The
          trainer may take a part of the B earlier, after which the same bound holds with what the step lacks added to
          it: the rest of the step can still take all that is due. Step t also waits until version t is published;
          with `overlap`, until version t - 1 is
  reject  the seat of a rejected group moves to the newest cohort, lead + v. The group that replaces it begins late: in
          the cohort of the rejected one it would soon be due, and the batch would wait for it

Why the bound is strict: a group of cohort c is born at a version >= c - lead, and nothing of it is left after step
c + slack, so its staleness is at most lead + slack = max_staleness. Why it cannot deadlock: call U(c) the number of
untrained seats of cohorts up to c. Before step t, U(c) <= (due - t + 1) * B. This holds when c is opened, since its B
seats are due later than those of the cohort before; a seat that moves to the newest cohort leaves its U as it was, and
lowers others. A step leaves at most (due - t) * B; once all groups have ended the lowest slots do that, since they take
B from every U(c), or all of it. Without rejections a cohort keeps B seats, and a step waits for the one that is due
alone; at slack 0 batch t is cohort t, in whatever order groups end. Bound 0 is synchronous, and there batch t is cohort
t whatever is rejected, since the newest cohort is then that of the rejected group. Both hold with `overlap`: they say
nothing about the version that is served when a step is taken. With lead 0 it has no effect, because cohort t is
admitted only at version t.

If the lead changes, a cohort keeps the step at which it is due, c + slack when it was opened. A lower lead applies to
later cohorts. A higher one changes every due to min(due, c + slack), and waits while some U(c) is too large for that.

No group is dropped, except by two options, which count what they throw away (both favor short answers):
  oversample      B + oversample groups of each cohort run, and the first B that end get its seats
  over_age=drop   step t does not wait for cohort t - slack when B other groups are ready: unfinished groups of that
                  cohort are dropped, and their seats move to the newest cohort

Pure: no I/O, no event loop, an injected clock. `rollout.groups` wraps it for the processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from asyncrl.rollout.hooks import Select, lowest_first
from asyncrl.rollout.ledger import Books
from asyncrl.schema import Group

SURPLUS, OVER_AGE = "surplus", "over_age"  # the seats went to other groups; the batch was taken without it


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


@dataclass(frozen=True)
class Demand:
    """What the next step must take, so that every later step can take what is due then."""

    cohort: int
    must: int  # number of groups of cohorts up to this one that it must take
    ready: int  # number of them that are ready


class CohortBuffer:
    """Slots with bounded staleness and complete accounting. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        batch_groups: int,
        max_staleness: int,
        lead: int | None = None,
        *,
        oversample: int = 0,
        over_age: Literal["wait", "drop"] = "wait",
        overlap: bool = False,
        select: Select = lowest_first,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_groups, self._bound = batch_groups, max_staleness
        self.lead = self._wanted_lead = max_staleness if lead is None else lead
        if self.slack < 0:
            raise ValueError(f"lead {self.lead} exceeds max_staleness {max_staleness}")
        self.version = self.step = 0  # served by every engine; the next batch to take
        self._oversample = oversample
        self._drops = over_age == "drop"
        self._select = select
        self._clock = clock
        self.ahead = int(overlap)  # by how many steps `take` may be ahead of the published version
        self._next_slot = self._filling = 0  # the next slot, and the cohort that it belongs to
        self._cohorts: dict[int, Cohort] = {}
        self._running, self._ready = dict[int, RunningGroup](), dict[int, ReadyGroup]()  # by slot
        self._ready_of = Counter[int]()  # their number by cohort, since `take` is called after every event
        self._training: dict[int, list[ReadyGroup]] = {}  # by step: with overlap, of two steps at most
        self._unwanted = list[Ticket]()
        self.books = Books(self._held)
        self._open(0)

    @property
    def slack(self) -> int:
        """Number of steps for which a group may be overtaken."""
        return self._bound - self.lead

    def change_lead(self, lead: int) -> None:
        """Use another lead: a lower one now, a higher one as soon as the rule allows it."""
        if not 0 <= lead <= self._bound:
            raise ValueError(f"lead {lead} is not between 0 and max_staleness {self._bound}")
        self._wanted_lead = lead
        self._move_lead()

    def admit(self) -> Ticket | None:
        """Return a ticket for the next group to play, or None until a publish or a rejection makes room."""
        while self._cohorts[self._filling].issued >= self._cohorts[self._filling].seats + self._oversample:
            if self._filling == self._newest():
                return None
            self._filling += 1
            self._open(self._filling)
            self._forget(self._filling - 1)
        ticket = Ticket(self._next_slot, self.version, self._filling)
        self._next_slot += 1
        self._running[ticket.slot] = RunningGroup(ticket, self._clock())
        self._cohorts[ticket.cohort].issued += 1
        self._cohorts[ticket.cohort].playing += 1
        self.books.issued["groups"] += 1
        return ticket

    def begin(self, ticket: Ticket, prompt: str, trajectories: int) -> None:
        """Record that the group of a ticket plays the prompt with this uid, in so many trajectories."""
        playing = self._running[ticket.slot]
        playing.prompt, playing.trajectories = prompt, trajectories
        self.books.issued["trajectories"] += trajectories

    def commit(self, ticket: Ticket, group: Group, *, discarded: int = 0) -> bool:
        """Add a finished group to the ready ones; `discarded` tokens are not in it. Returns False if it is rejected,
        because its cohort has no seat left."""
        cohort = self._cohorts[ticket.cohort]
        if cohort.taken == cohort.seats:
            self.reject(ticket, self._too_late(ticket), tokens=group.num_tokens + discarded)
            return False
        playing = self._close(ticket)
        self._ready[ticket.slot] = ReadyGroup(ticket.cohort, playing.prompt, group, group.num_tokens)
        self._ready_of[ticket.cohort] += 1
        self.books.tokens["discarded"] += discarded
        cohort.taken += 1
        if cohort.taken == cohort.seats:
            self._dismiss(ticket.cohort)
        return True

    def reject(self, ticket: Ticket, reason: str, *, tokens: int = 0) -> None:
        """Reject a group that must not be trained. It is counted, and replaced while its cohort needs another group."""
        playing = self._close(ticket)
        self.books.reject(reason, playing, tokens)
        cohort = self._cohorts[ticket.cohort]
        if cohort.playing < cohort.seats - cohort.taken:
            cohort.seats -= 1
            cohort.issued -= 1
            self.books.requeued += 1
            self._move_seats(1)
        self._forget(ticket.cohort)

    def unwanted(self) -> list[tuple[Ticket, str]]:
        """Return the running groups that became superfluous since the last call, and the reason of their rejection."""
        unwanted, self._unwanted = self._unwanted, []
        return [(ticket, self._too_late(ticket)) for ticket in unwanted if self._runs(ticket)]

    def take(self, count: int | None = None) -> list[Group] | None:
        """Return `count` groups of step `self.step`, lowest slot first, or None until the cohort rule allows them. By
        default these are all that the batch lacks."""
        left = self._left
        count = min(count or left, left)
        if self.step > self.version + self.ahead or len(self._ready) < count:
            return None  # the previous version is not published yet, or too few groups are ready
        if self._drops:
            self._drop_late()
        later = left - count
        bounds = [(one.must - later, one.ready) for one in self._demands()]
        if not self._drops and any(must > ready for must, ready in bounds):
            return None
        slots = sorted(self._ready)[: max(0, *(min(must, ready) for must, ready in bounds))]
        taken = [self._ready.pop(slot) for slot in sorted(slots + self._chosen(set(slots), count))]
        self._ready_of -= Counter(one.cohort for one in taken)
        self._training.setdefault(self.step, []).extend(taken)
        if not later:
            self.step += 1
            for number in list(self._cohorts):
                self._forget(number)
        return [one.group for one in taken]

    def publish(self, version: int) -> None:
        """Record that every engine serves `version`: the batch behind it is trained, and the next cohort may start."""
        if version != self.version + 1 or version > self.step:
            raise ValueError(f"version {version} published after version {self.version}, {self.step} batches taken")
        self.version = version
        trained = self._training.pop(version - 1)
        self.books.train(trained)
        self._move_lead()

    @property
    def training(self) -> list[Group]:
        """The batch that was taken last, until the version that it produces is published."""
        return [played.group for played in self._training[max(self._training)]] if self._training else []

    @property
    def ready(self) -> int:
        """Number of groups that wait for their batch."""
        return len(self._ready)

    def due(self) -> int:
        """Return the cohort which the next batch must complete, with all older ones."""
        return max((n for n, one in self._cohorts.items() if one.due <= self.step), default=min(self._cohorts) - 1)

    def awaited(self) -> int:
        """Return the cohort of which, or of older ones, the next batch needs more groups; `due` if it needs none."""
        return next((one.cohort for one in self._demands() if one.must > one.ready), self.due())

    def waiting_for(self) -> str:
        """Say why `take` returns nothing now, for a diagnosis."""
        cohort = self.awaited()
        missing = sorted(slot for slot, playing in self._running.items() if playing.ticket.cohort <= cohort)
        oldest = max((self._clock() - playing.since for playing in self._running.values()), default=0.0)
        due = f"due but not ready: slots {missing[:8]}; " if missing else ""
        return (
            f"step {self.step} needs {self._left} ready groups, but has {len(self._ready)}; {due}"
            f"{len(self._running)} running, the oldest for {oldest:.0f} s; version {self.version}"
        )

    # -- internals -----------------------------------------------------------------------------------------

    def _held(self) -> tuple[list[RunningGroup], list[ReadyGroup], list[ReadyGroup]]:
        """Return the groups that are running, ready and in training."""
        return list(self._running.values()), list(self._ready.values()), [*chain(*self._training.values())]

    @property
    def _left(self) -> int:
        """Number of groups that step `self.step` has not taken yet."""
        return self.batch_groups - len(self._training.get(self.step, []))

    def _demands(self, cohorts: dict[int, Cohort] | None = None) -> list[Demand]:
        """Return what the next step must take of each cohort, and of all older ones: of the buffer's, or of these."""
        wanted = []
        untrained = 0
        counted = 0
        for number, cohort in sorted((cohorts or self._cohorts).items()):
            ready = self._ready_of[number]
            counted += ready
            untrained += cohort.seats - cohort.taken + ready
            must = untrained - (cohort.due - self.step) * self.batch_groups
            wanted.append(Demand(number, max(0, must) if untrained else 0, counted))
        return wanted

    def _drop_late(self) -> None:
        """Give up what is left of the cohorts that are due, and what does not fit into the batch; the seats move."""
        last = self.due()
        late = sorted(slot for slot, played in self._ready.items() if played.cohort <= last)[self.batch_groups :]
        for dropped in map(self._ready.pop, late):  # non-empty only after seats have moved
            self._ready_of[dropped.cohort] -= 1
            self.books.reject(OVER_AGE, dropped, dropped.tokens)
        self._move_seats(len(late))
        for number, cohort in [one for one in self._cohorts.items() if one[0] <= last and one[1].taken < one[1].seats]:
            self._move_seats(cohort.seats - cohort.taken)
            cohort.seats = cohort.taken
            self._dismiss(number)

    def _chosen(self, due: set[int], wanted: int) -> list[int]:
        """Return the slots besides those that are due, of `wanted` in total, as `select` chooses them."""
        count = wanted - len(due)
        others = {slot: played.group for slot, played in sorted(self._ready.items()) if slot not in due}
        chosen = [group.slot for group in self._select(list(others.values()), count)] if count else []
        if len(set(chosen)) != count or not set(chosen) <= others.keys():
            raise ValueError(f"select must choose {count} of the ready slots {sorted(others)}, but chose {chosen}")
        return chosen

    def _dismiss(self, cohort: int) -> None:
        """Mark the remaining groups of a cohort as unwanted: its seats are taken."""
        self._unwanted += [one.ticket for one in self._running.values() if one.ticket.cohort == cohort]

    def _move_seats(self, count: int) -> None:
        self._open(self._newest())
        self._cohorts[self._newest()].seats += count

    def _newest(self) -> int:
        """Return the newest cohort that may be admitted. A lower lead leaves those open that are."""
        return max(self.lead + self.version, *self._cohorts)

    def _open(self, newest: int) -> None:
        """Open the cohorts up to this one."""
        for number in range(max(self._cohorts, default=-1) + 1, newest + 1):
            self._cohorts[number] = Cohort(self.batch_groups, number + self.slack)

    def _move_lead(self) -> None:
        """Approach the wanted lead as far as the rule allows."""
        self.lead = min(self.lead, self._wanted_lead)
        while self.lead < self._wanted_lead:
            slack = self.slack - 1
            changed = {number: replace(one, due=min(one.due, number + slack)) for number, one in self._cohorts.items()}
            if any(one.must > self._left for one in self._demands(changed)):
                return
            self.lead, self._cohorts = self.lead + 1, changed

    def _too_late(self, ticket: Ticket) -> str:
        """Return the reason why a group has no seat any more."""
        return OVER_AGE if self._cohorts[ticket.cohort].due < self.step else SURPLUS

    def _runs(self, ticket: Ticket) -> bool:
        playing = self._running.get(ticket.slot)
        return playing is not None and playing.ticket == ticket

    def _close(self, ticket: Ticket) -> RunningGroup:
        if not self._runs(ticket):
            raise ValueError(f"{ticket} is not running")
        self._cohorts[ticket.cohort].playing -= 1
        return self._running.pop(ticket.slot)

    def _forget(self, cohort: int) -> None:
        """Delete a past cohort once all of its groups were admitted and have ended."""
        one = self._cohorts.get(cohort)
        if one and cohort < self._filling and one.due < self.step and one.playing == 0:
            del self._cohorts[cohort]
