"""Admission, staleness and the ledger: the one piece of shared state between rollouts and trainer.

The cohort rule. Slots are numbered in admission order; with B groups in a batch, slot k belongs to cohort k // B.
v is the version that the whole fleet serves, `lead` <= `max_staleness`, slack = max_staleness - lead.

  admit   slot k while k < (lead + v + 1) * B
  take    step t takes every untrained slot of cohort t - slack, then the lowest ready slots, B in all;
          it waits until those of cohort t - slack are ready and B are ready in all
  reject  a rejected group's replacement keeps its slot, with a later birth

Why the bound is strict: a slot of cohort c is born at a version >= c - lead and trained at a step <= c + slack, so its
staleness is at most lead + slack = max_staleness. Why it cannot lock: at every step (lead + 1) * B slots are admitted
and untrained, so B ready ones come as soon as the running groups end. Nothing is dropped; max_staleness 0 is
synchronous, and with slack 0 batch t is cohort t whatever the completion times.

Pure: no I/O, no event loop, an injected clock. `rollout.service` wraps it for the processes.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.types import Group


@dataclass(frozen=True)
class Ticket:
    """The right to play one group: its slot, and how many groups were played for that slot before."""

    slot: int
    attempt: int
    born: int  # version served by the fleet when the ticket was issued

    @property
    def uid(self) -> str:
        """Fixed width: no request id may be a prefix of another (engines abort by prefix)."""
        return f"g{self.slot:08d}a{self.attempt:04d}"


@dataclass(frozen=True)
class Ledger:
    """Where every issued group is. issued = running + ready + training + trained + rejected, at every instant."""

    issued: int
    running: int
    ready: int
    training: int
    trained: int
    rejected: dict[str, int]
    tokens_generated: int  # in groups that have ended
    tokens_held: int  # ready or in training
    tokens_trained: int
    tokens_rejected: int
    tokens_discarded: int  # of accepted groups, but in none of their trajectories

    def check(self) -> None:
        """Raises AssertionError when a group or a token is unaccounted for."""
        placed = self.running + self.ready + self.training + self.trained + sum(self.rejected.values())
        assert self.issued == placed, f"ledger: issued {self.issued} groups, accounted for {placed}: {self}"
        tokens = self.tokens_held + self.tokens_trained + self.tokens_rejected + self.tokens_discarded
        assert self.tokens_generated == tokens, (
            f"ledger: engines wrote {self.tokens_generated} tokens, accounted for {tokens}: {self}"
        )


class CohortBuffer:
    """Slots, bounded staleness, and nothing unaccounted. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        batch_groups: int,
        max_staleness: int,
        lead: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_groups = batch_groups
        self.lead = max_staleness if lead is None else lead
        self.slack = max_staleness - self.lead
        if self.slack < 0:
            raise ValueError(f"lead {self.lead} exceeds max_staleness {max_staleness}")
        self.version = 0  # served by every engine
        self.step = 0  # the next batch to take
        self._clock = clock
        self._next_slot = 0
        self._vacant: list[
            tuple[int, int]
        ] = []  # heap of (slot, attempt): rejected, to be played anew before new slots
        self._running: dict[int, tuple[Ticket, float]] = {}
        self._ready: dict[int, Group] = {}
        self._training: list[Group] = []
        self._trained_slots: set[int] = set()  # those at or above the oldest cohort still open
        self._counts: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def admit(self) -> Ticket | None:
        """The next group to play, or None until a publish or a rejection makes room."""
        if self._vacant:
            slot, attempt = heapq.heappop(self._vacant)
        elif self._next_slot < (self.lead + self.version + 1) * self.batch_groups:
            slot, attempt = self._next_slot, 0
            self._next_slot += 1
        else:
            return None
        ticket = Ticket(slot, attempt, self.version)
        self._running[slot] = (ticket, self._clock())
        self._counts["issued"] += 1
        return ticket

    def commit(self, ticket: Ticket, group: Group, *, discarded: int = 0) -> None:
        """A played group waits for its batch; engines also wrote `discarded` tokens that are not in it."""
        self._close(ticket)
        self._ready[ticket.slot] = group
        self._counts["tokens_generated"] += group.num_tokens + discarded
        self._counts["tokens_discarded"] += discarded

    def reject(self, ticket: Ticket, reason: str, *, tokens: int = 0) -> None:
        """A group that must not be trained: counted, and its slot is played anew."""
        self._close(ticket)
        self._rejected[reason] += 1
        self._counts["tokens_generated"] += tokens
        self._counts["tokens_rejected"] += tokens
        heapq.heappush(self._vacant, (ticket.slot, ticket.attempt + 1))

    def take(self) -> list[Group] | None:
        """The groups of step `self.step`, lowest slot first, or None until the rule allows them."""
        if self.step > self.version:
            return None  # the batch before is still in training or being published
        due = self._due()
        if len(self._ready) < self.batch_groups or not due <= self._ready.keys():
            return None
        others = sorted(self._ready.keys() - due)
        slots = sorted(due | set(others[: self.batch_groups - len(due)]))
        self._training = [self._ready.pop(slot) for slot in slots]
        self._trained_slots.update(slots)
        self.step += 1
        return self._training

    def publish(self, version: int) -> None:
        """Every engine serves `version`: the batch that made it is trained, and the next cohort may start."""
        if version != self.version + 1 or version != self.step:
            raise ValueError(
                f"version {version} published after version {self.version}, with {self.step} batches taken"
            )
        self.version = version
        self._counts["trained"] += len(self._training)
        self._counts["tokens_trained"] += sum(group.num_tokens for group in self._training)
        self._training = []
        oldest_open = max(0, version - self.slack) * self.batch_groups
        self._trained_slots = {slot for slot in self._trained_slots if slot >= oldest_open}

    def ledger(self) -> Ledger:
        """Every group's place, and every token's."""
        counts = self._counts
        return Ledger(
            counts["issued"],
            len(self._running),
            len(self._ready),
            len(self._training),
            counts["trained"],
            dict(self._rejected),
            counts["tokens_generated"],
            sum(group.num_tokens for group in (*self._ready.values(), *self._training)),
            counts["tokens_trained"],
            counts["tokens_rejected"],
            counts["tokens_discarded"],
        )

    def waiting_for(self) -> str:
        """Why `take` gives nothing now, for a diagnosis."""
        missing = sorted(self._due() - self._ready.keys())
        now = self._clock()
        oldest = max((now - since for _, since in self._running.values()), default=0.0)
        return (
            f"step {self.step} needs {self.batch_groups} ready groups and has {len(self._ready)}; "
            f"due but not ready: slots {missing[:8]}; {len(self._running)} running, the oldest for {oldest:.0f} s; "
            f"version {self.version}"
        )

    def _due(self) -> set[int]:
        """Untrained slots of the cohort that must go at this step."""
        cohort = self.step - self.slack
        if cohort < 0:
            return set()
        return set(range(cohort * self.batch_groups, (cohort + 1) * self.batch_groups)) - self._trained_slots

    def _close(self, ticket: Ticket) -> None:
        held = self._running.get(ticket.slot)
        if held is None or held[0] != ticket:
            raise ValueError(f"{ticket} is not running")
        del self._running[ticket.slot]
