"""A trainer and a rollout side that take turns at random."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.hooks import lowest_first
from asyncrl.rollout.ledger import Ledger
from asyncrl.rollout.snapshot import BufferState, ResumableBuffer
from asyncrl.schema import Group
from tests.fakes import group


@dataclass
class Run:
    """A trainer and a rollout side that take turns at random, with books of their own to check the ledger against."""

    batch_groups: int
    lead: int
    slack: int
    seed: int = 0
    rejections: float = 0.0
    rejects: Callable[[int], bool] | None = None  # whether the group of a slot is rejected, instead of by chance
    concurrency: int = 10**6
    stragglers: float = 0.0  # share of tickets that end only when nothing else can happen
    steps: int = 12
    oversample: int = 0
    over_age: str = "wait"
    picky: bool = False  # a hook that chooses at random
    saves: bool = False  # after every event the buffer is another one, made from what a snapshot keeps
    moves: bool = False  # the lead changes at random, within the bound
    parts: bool = False  # batches are taken in parts of any size
    overlap: bool = False  # a batch may be taken while the version before it is being published
    batches: list[list[int]] = field(default_factory=list)
    births: list[list[int]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bound = self.lead + self.slack
        self.random = random.Random(self.seed)
        self.buffer = self._new_buffer()
        self.running: list[Ticket] = []
        self.sizes: dict[Ticket, int] = {}
        self.received: Counter[Ticket] = Counter()  # tokens of running groups
        self.slow: set[Ticket] = set()
        self.born: dict[int, int] = {}
        self.cohorts: dict[int, int] = {}  # of all slots that were not rejected
        self.books: Counter[str] = Counter()
        self.training: defaultdict[int, Counter[str]] = defaultdict(Counter)  # groups and tokens, by step
        self.reasons: Counter[str] = Counter()

    def _new_buffer(self) -> ResumableBuffer:
        return ResumableBuffer(
            self.batch_groups,
            self.bound,
            self.lead,
            oversample=self.oversample,
            over_age=self.over_age,  # type: ignore[arg-type]
            overlap=self.overlap,
            select=(lambda ready, count: self.random.sample(ready, count)) if self.picky else lowest_first,
            clock=lambda: 0.0,
        )

    def _resume(self) -> None:
        """Replace the buffer by what a crash and a restart leave of it."""
        saved = msgspec.msgpack.decode(msgspec.msgpack.encode(self.buffer.state()), type=BufferState)
        self.buffer = self._new_buffer()
        self.buffer.restore(saved)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(self.buffer.state()), type=BufferState) == saved

    def play(self) -> Run:
        weights = [self.random.choice([1, 5, 25]) for _ in range(4)]
        actions = [self._admit, self._finish, self._take, self._publish]
        while self.buffer.version < self.steps:
            order = sorted(zip(actions, weights, strict=True), key=lambda a: -(self.random.random() ** (1 / a[1])))
            if not any(action() for action, _ in order) and not self._finish(slow=True):
                raise AssertionError(f"dead-lock: {self.buffer.waiting_for()}")
            if self.saves:
                self._resume()
            self._hear()
            self._move()
            self._check()
        return self

    def _admit(self) -> bool:
        if len(self.running) >= self.concurrency or (ticket := self.buffer.admit()) is None:
            return False
        self.running.append(ticket)
        self.cohorts[ticket.slot] = ticket.cohort
        if self.random.random() < self.stragglers:
            self.slow.add(ticket)
        assert ticket.born == self.buffer.version
        self.sizes[ticket] = self.random.randint(1, 4)
        self.buffer.begin(ticket, f"p{self.books['issued']}", self.sizes[ticket])
        self.books["issued"] += 1
        self.books["trajectories"] += self.sizes[ticket]
        self.trace.append("admit")
        return True

    def _finish(self, slow: bool = False) -> bool:
        candidates = [ticket for ticket in self.running if slow or ticket not in self.slow]
        if not candidates:
            return False
        ticket = self.random.choice(candidates)
        self.running.remove(ticket)
        tokens, size = self.random.randint(1, 4), self.sizes[ticket]
        self._hear(ticket, max(0, tokens * size - self.received[ticket]))
        if self.rejects(ticket.slot) if self.rejects else self.random.random() < self.rejections:
            self._reject(ticket, self.random.choice(["judge", "timeout"]))
        else:
            self._end(ticket)
            played = group(ticket.slot, [0.0] * size, tokens=tokens, versions=(ticket.born,))
            self.buffer.commit(ticket, played, discarded=self.received.pop(ticket, 0) - tokens * size)
            self.born[ticket.slot] = ticket.born
            self.books["ready"] += 1
        self.trace.append("finish")
        return True

    def _hear(self, ticket: Ticket | None = None, tokens: int = 1) -> None:
        """Tokens come in, for a group that is being played or, late, for one that has ended."""
        ticket = ticket or self.random.choice([None, *self.running])
        self.books["generated"] += tokens
        if ticket:
            self.received[ticket] += tokens
        else:
            self.books["late"] += tokens

    def _reject(self, ticket: Ticket, reason: str) -> None:
        self._end(ticket)
        del self.cohorts[ticket.slot]
        self.books["lost"] += self.received[ticket]
        self.reasons[reason] += 1
        self.buffer.reject(ticket, reason, tokens=self.received.pop(ticket, 0))

    def _end(self, ticket: Ticket) -> None:
        self.books["ended trajectories"] += self.sizes[ticket]

    def _ledger(self) -> Ledger:
        books = self.books
        received = {"training": books["generated"]}
        ledger = self.buffer.books.ledger(books["issued"], received, sum(self.received.values()), books["late"])
        ledger.check()
        return ledger

    def _take(self) -> bool:
        step, ready = self.buffer.step, sorted(self.born)
        mine = self.training[step]
        count = self.random.randint(1, self.batch_groups - mine["groups"]) if self.parts else None
        if step == self.steps or (groups := self.buffer.take(count)) is None:
            return False
        assert [one.slot for one in groups] == ready[: count or self.batch_groups]
        for one in groups:
            assert self.born[one.slot] == one.trajectories[0].oldest_version
            assert all(0 <= age <= self.bound for age in one.staleness(step)), (step, one)
        assert step <= self.buffer.version + self.overlap
        if not mine["groups"]:
            self.batches.append([])
            self.births.append([])
        self.batches[-1] += [one.slot for one in groups]
        self.births[-1] += [self.born.pop(one.slot) for one in groups]
        self.books["ready"] -= len(groups)
        self._note_taken(step, groups)
        assert self.buffer.step == step + (mine["groups"] == self.batch_groups)
        self.trace.append("take")
        return True

    def _note_taken(self, step: int, groups: list[Group]) -> None:
        self.training[step] += Counter(groups=len(groups), tokens=sum(one.num_tokens for one in groups))

    def _publish(self) -> bool:
        version = self.buffer.version
        if self.training[version]["groups"] < self.batch_groups:
            return False
        self.buffer.publish(version + 1)
        trained = self.training.pop(version)
        self.books["trained"] += trained["groups"]
        self.books["tokens_trained"] += trained["tokens"]
        self.trace.append("publish")
        return True

    def _move(self) -> None:
        """Ask for another lead at any moment."""
        if self.moves and self.random.random() < 0.1:
            wanted = self.random.randint(0, self.bound)
            self.buffer.change_lead(wanted)
            assert self.buffer.lead <= max(self.lead, wanted)
        self.lead = max(self.lead, self.buffer.lead)  # the largest so far bounds what is in play

    def _check(self) -> None:
        ledger, books = self._ledger(), self.books
        groups, trajectories = ledger.groups, ledger.trajectories
        assert groups.issued == books["issued"]
        assert groups.running == len(self.running)
        training = sum(batch["groups"] for batch in self.training.values())
        assert (groups.ready, groups.training, groups.trained) == (books["ready"], training, books["trained"])
        assert groups.rejected == dict(self.reasons)
        assert ledger.prompts == groups  # each is played in one group
        assert trajectories.issued == books["trajectories"]
        assert trajectories.running == books["trajectories"] - books["ended trajectories"]
        assert (ledger.tokens.trained, ledger.tokens.rejected) == (books["tokens_trained"], books["lost"])
        assert ledger.events.requeued <= sum(self.reasons.values())
        alive = groups.running + groups.ready + groups.training
        assert alive <= (self.lead + 1) * self.batch_groups
        assert alive + groups.trained <= (self.lead + self.buffer.version + 1) * self.batch_groups


def schedules(kind: type[Run], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Runs of every shape; `more` draws further fields."""
    return st.builds(
        kind,
        batch_groups=st.integers(1, 6),
        lead=st.integers(0, 5),
        slack=st.integers(0, 5),
        seed=st.integers(0, 2**32),
        rejections=st.sampled_from([0.0, 0.2, 0.6]),
        concurrency=st.sampled_from([1, 2, 5, 10**6]),
        stragglers=st.sampled_from([0.0, 0.1, 0.5]),
        saves=st.booleans(),
        overlap=st.booleans(),
        **more,
    )
