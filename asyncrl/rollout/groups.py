"""The life of a group, from its ticket to the batch it is trained in: the buffer with an event loop around it. The
worker plays groups; the server (server.py) hands batches to the trainer. What makes a state of it, and goes on from
one, is in snapshot.py.

    ticket -> begin -> commit or reject -> batch -> published

Every change wakes all waiters.

waits for     admission (`ticket`), a batch (`batch`), superfluous groups (`unwanted`)
unblocked by  a version that is published, and every group that ends
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.engine.client import GenerationClient
from asyncrl.engine.loads import Load
from asyncrl.engine.session import GenerationSession
from asyncrl.extension import RolloutHooks
from asyncrl.rollout.buffer import CohortBuffer, Ticket
from asyncrl.rollout.events import (
    Adjusted,
    Admitted,
    Event,
    GroupCommitted,
    GroupRejected,
    PartTaken,
    Published,
    Taken,
)
from asyncrl.rollout.ledger import Ledger
from asyncrl.rollout.status import described, most_silent
from asyncrl.rollout.timelines import COMMITTED, Timelines
from asyncrl.schema import Batch, Group, Prompt, part_of

CHECK_SECONDS = 5.0
"""The ledger is checked at every batch and version, and in between when a group ends, but at most once per this
interval: a check costs 0.8 ms with a thousand groups of 16 running, 27 ms with ten thousand.
"""


NAMED = 4
"""Number of running groups that a diagnosis lists."""


class WrongBatch(Exception):
    """Raised when a batch is asked for that is not the next one."""


@dataclass(frozen=True)
class PromptName:
    """Enough to render a prompt again."""

    uid: str
    task: str
    index: int


@dataclass(frozen=True)
class GroupInPlay:
    """A running group, with the session of each sibling."""

    ticket: Ticket
    prompt: PromptName
    siblings: Sequence[GenerationSession]
    admitted: float = field(default_factory=time.time)


class ConcurrencyLimiter:
    """Limiter of concurrent groups, as the worker uses it. This one never blocks: the buffer's admission is the only
    bound."""

    async def acquire(self, episodes: int) -> None:
        """Wait until a group of so many episodes may start."""

    def give_back(self, episodes: int) -> None:
        """Return so many episodes: the group is smaller than announced."""

    def release(self, episodes: int) -> None:
        """Record that a group has ended."""

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """Record that the trainer took a batch of `batch` groups, that it waited or not, and that `ready` groups are
        left."""

    def resize(self, groups: int) -> None:
        """Change a fixed maximum of groups."""

    async def watch(
        self, ask: Callable[[], Awaitable[list[Load]]], needed: Callable[[], float], holding: Callable[[], bool]
    ) -> None:
        """Follow the engines' loads, if the limit depends on them."""

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl."""
        return {}


class GroupLifecycle:
    """All groups of a run, and the accounting of what becomes of them."""

    def __init__(
        self,
        buffer: CohortBuffer,
        client: GenerationClient,
        *,
        limiter: ConcurrencyLimiter | None = None,
        publish: Callable[[dict[str, Any]], None] = lambda ledger: None,
        figures: Callable[[], dict[str, float]] = dict,
        timelines: Timelines | None = None,
        hooks: Sequence[RolloutHooks] = (),
    ) -> None:
        """`publish` receives the ledger at every version; `figures` returns further figures for a batch;
        `hooks` get every event."""
        self._buffer = buffer
        self._client = client
        self._limiter = limiter or ConcurrencyLimiter()
        self._publish = publish
        self._more_figures = figures
        self._timelines = timelines or Timelines()
        self._hooks = hooks
        self._waited = False
        self._changed = asyncio.Condition()
        self._released = asyncio.Event()
        self._samples = 0  # trajectories that were committed since the last batch
        self._drawn = 0
        self._playing: dict[Ticket, GroupInPlay] = {}
        self._parts: dict[int, list[Batch]] = {}  # of the batches that are in training, by version
        self._retried: Counter[str] = Counter()
        self._tokens_reported: Counter[str] = Counter()
        self._checked = 0.0

    # -- called by the worker ------------------------------------------------------------------------------

    async def ticket(self) -> Ticket:
        """Wait for admission. A publish or a rejection unblocks it."""
        async with self._changed:
            while (ticket := self._buffer.admit()) is None:
                await self._changed.wait()
            return ticket

    def draw(self, next_prompt: Callable[[], Prompt]) -> Prompt:
        """Draw and count the next prompt."""
        prompt = next_prompt()
        self._drawn += 1
        return prompt

    def begin(self, ticket: Ticket, prompt: Prompt, siblings: Sequence[GenerationSession]) -> None:
        """Record that the group of a ticket plays this prompt, with one trajectory per session."""
        self._buffer.begin(ticket, prompt.uid, len(siblings))
        self.tell(Admitted(ticket.slot, ticket.born, ticket.cohort, prompt.uid, len(siblings)))
        name = PromptName(prompt.uid, prompt.task, prompt.index)
        self._playing[ticket] = GroupInPlay(ticket, name, siblings)

    async def commit(self, ticket: Ticket, group: Group) -> None:
        """Hand in a finished group; engines may have generated more tokens for it than its agent kept."""
        discarded = self._close(ticket, COMMITTED, group.rewards) - group.num_tokens
        self._buffer.commit(ticket, group, discarded=discarded)
        self.tell(GroupCommitted(ticket.slot, group, discarded))
        self._samples += len(group.rewards)
        await self._ended()

    async def reject(self, ticket: Ticket, reason: str, group: Group | None = None) -> None:
        """Reject a group, with the tokens that engines generated for it; another will replace it. Pass `group` if it
        was played to its end."""
        received = self._close(ticket, reason, group.rewards if group else [])
        self._buffer.reject(ticket, reason, tokens=received)
        self.tell(GroupRejected(ticket.slot, reason, received, group))
        await self._ended()

    def _close(self, ticket: Ticket, outcome: str, rewards: Sequence[float]) -> int:
        """Close the sessions and return the tokens that engines generated for them."""
        group = self._playing.pop(ticket)
        received = sum(session.close() for session in group.siblings)
        self._timelines.group(ticket, group.prompt.task, group.admitted, group.siblings, outcome, rewards)
        return received

    async def _ended(self) -> None:
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self.ledger()
        await self._wake()

    async def unwanted(self) -> list[tuple[Ticket, str]]:
        """Wait for groups that became superfluous; return them with the reason of their rejection."""
        async with self._changed:
            while not (unwanted := self._buffer.unwanted()):
                await self._changed.wait()
            return unwanted

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- called by the server ------------------------------------------------------------------------------

    @property
    def batch_groups(self) -> int:
        """Number of groups of a batch."""
        return self._buffer.batch_groups

    @property
    def published_version(self) -> int:
        """Version that the engines serve."""
        return self._buffer.version

    async def batch(self, version: int, part: int = 0, parts: int = 1) -> Batch:
        """Wait for the batch that turns version `version` into the next one, or for part number `part` of `parts`. It
        stays the same until that version is published, because a reader may disconnect. Raises WrongBatch."""
        async with self._changed:
            while (batch := self._take(version, part, parts)) is None:
                if version != self._buffer.step:
                    raise WrongBatch(f"batch {version} was requested, but the next one is {self._buffer.step}")
                if part > (next_part := len(self._parts.get(version, []))):
                    asked = f"part {part} of batch {version}"
                    raise WrongBatch(f"{asked} was requested, but the next one is {next_part}")
                self._waited = True
                self._timelines.asked()
                await self._changed.wait()
        await self._wake()  # wakes other requests, and `unwanted` for groups that the batch left behind
        return batch

    def _take(self, version: int, part: int, parts: int) -> Batch | None:
        """Return a part of the batch in training, or take it from the buffer once it is ready."""
        taken = self._parts.get(version, [])
        if part < len(taken):
            return taken[part]
        if version != self._buffer.step or part != len(taken) or not self.may_take():
            return None
        start, end = part_of(self._buffer.batch_groups, part, parts)
        if (groups := self._buffer.take(end - start)) is None:
            return None
        last = self._buffer.step > version
        batch = Batch(version, groups, self._taken(version) if last else {}, last)
        self._parts.setdefault(version, []).append(batch)
        if not last:
            self.tell(PartTaken(version, [group.uid for group in groups]))
            self._timelines.part_taken()
        return batch

    def _taken(self, version: int) -> dict[str, float]:
        """Report that a batch is complete. Return the figures that go with it."""
        uids = [group.uid for group in self._buffer.training]
        self._limiter.taken(self._buffer.ready, len(uids), waited=self._waited)
        self._timelines.taken(version, uids)
        self._waited = False
        figures = self._figures()
        self.tell(Taken(version, uids, figures))
        return figures

    def may_take(self) -> bool:
        """Return whether a batch may be taken as soon as the buffer allows it."""
        return True

    async def adjust(self, lead: int | None, groups: int | None) -> None:
        """Change the lead, or a fixed number of groups in flight."""
        if lead is not None:
            self._buffer.change_lead(lead)
            self.tell(Adjusted(lead, time.time()))
        if groups is not None:
            self._limiter.resize(groups)
        await self._wake()

    async def may_publish(self, version: int) -> None:
        """Wait until a published version may open admission."""

    async def published(self, version: int) -> bool:
        """Record that every engine serves a version. Return whether it is new: if it is not, weights were sent again,
        and nothing was trained."""
        await self.may_publish(version)
        held = self._client.inflight.held
        self._client.inflight.release(version)
        await self._client.inflight.confirmed()
        new = version != self._buffer.version
        if new:
            self._buffer.publish(version)
            self._parts.pop(version - 1, None)
        self._timelines.published(version, held)
        self._released.set()
        ledger = asdict(self.ledger())
        if new:
            self.tell(Published(version, time.time(), ledger))
        self._publish({"version": version, **ledger})
        await self._wake()
        return new

    def tell(self, event: Event) -> None:
        """Tell the extensions of an event, and of a group that was played to its end."""
        group = event.group if isinstance(event, GroupCommitted | GroupRejected) else None
        for hooks in self._hooks:
            if group:
                hooks.group(group)
            hooks.event(event)

    async def released(self) -> None:
        """Wait until the trainer reports that every engine serves its version."""
        await self._released.wait()

    # -- status and accounting -----------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Return the ledger after checking it. Raises LedgerError."""
        flight = self._client.inflight
        running = sum(session.received for group in self._playing.values() for session in group.siblings)
        retried = dict(self._retried + flight.figures.continued)
        ledger = self._buffer.books.ledger(self._drawn, flight.tokens, running, flight.late_tokens, retried)
        ledger.check()
        self._checked = time.monotonic()
        return ledger

    def running(self) -> list[GroupInPlay]:
        """Return the running groups."""
        return list(self._playing.values())

    def waiting_for(self) -> str:
        """Say why the next batch is not ready, and what the groups that have been silent longest are waiting for."""
        groups, now = self.running(), time.monotonic()
        due = [group for group in groups if group.ticket.cohort <= self._buffer.awaited()]
        lines = [described(group, now) for group in most_silent(due or groups, NAMED, now)]
        return "; ".join([self._buffer.waiting_for(), *lines])

    def _figures(self) -> dict[str, float]:
        """Return the figures of the rollout side since the last batch."""
        seen = self._client.inflight.take_figures()
        self._retried.update(seen.continued)
        ledger = self.ledger()
        samples, self._samples = self._samples, 0
        counted = ledger.received()
        since, self._tokens_reported = counted - self._tokens_reported, counted
        return {
            **ledger.figures(since, samples),
            "admission/lead": self._buffer.lead,
            "time/engine_busy": seen.seconds_busy,
            **self._limiter.figures(),
            "prefix_cache/hit": seen.cached_tokens / max(1, seen.prompt_tokens),
            "tokens/refilled": seen.refilled_tokens,
            "tokens/inferred": seen.inferred_tokens,
            **{f"requests/{cause}": count for cause, count in seen.continued.items()},
            **self._more_figures(),
        }
