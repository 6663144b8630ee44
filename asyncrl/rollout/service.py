"""The rollout process's HTTP service: the only interface between trainer and rollouts.

    GET  /batch?version=v&reader=r&readers=R
                            the batch that turns version v into v + 1, as msgpack; 202 and the reason until it is ready.
                            Each of R readers gets the same bytes, as often as it asks, until version v + 1 is published
    POST /hold              weights are about to change: hold new requests back; 202 while a drain is in progress
    POST /version {"version": v}    every engine serves v: release requests, open admission
    POST /evaluate          answer the held-out questions; returns their lines of eval.jsonl
    POST /snapshot {"version": v}   the whole rollout state for a checkpoint, as bytes; between a version and its batch
    GET  /status            the ledger, and what the next batch waits for
    GET  /health            200 once rollouts run

Back-pressure: one batch is encoded at a time, because the next can be taken only after the version that this one makes
is published; and no more groups run than the buffer admits: (lead + 1) batches, plus oversample.

Each wait here is bounded by POLL_SECONDS and repeated by the trainer, which owns the deadline (rollout.batch_timeout).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.engine.client import GenerationClient, GenerationSession
from asyncrl.errors import AsyncRLError
from asyncrl.rollout.activity import slowest
from asyncrl.rollout.audit import Audit
from asyncrl.rollout.buffer import CohortBuffer
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.ledger import Ledger, SourceCounts
from asyncrl.rollout.limiter import ConcurrencyLimiter, UnboundedConcurrency
from asyncrl.rollout.recorder import Recorder
from asyncrl.rollout.snapshot import Outstanding, PromptName, ServiceState, SiblingSnapshot
from asyncrl.schema import Batch, Group, Prompt, encode

POLL_SECONDS = 2.0
"""Between two polls a waiting trainer checks for restarted engines and routers (Fleet.reconcile)."""
CHECK_SECONDS = 5.0
"""The ledger is checked at every batch and version, and in between when a group ends, but at most once per this
interval: a check costs 0.8 ms with a thousand groups of 16 running, 27 ms with ten thousand.
"""


@dataclass(frozen=True)
class _Encoded:
    """The batch that is in training, and who has read it."""

    version: int
    data: bytes
    readers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Group:
    """A running group."""

    prompt: PromptName
    siblings: Sequence[GenerationSession]


class Service:
    """The buffer with an event loop around it: every change wakes all waiters."""

    def __init__(
        self,
        buffer: CohortBuffer,
        client: GenerationClient,
        evaluations: Evaluations,
        api_key: str,
        *,
        limiter: ConcurrencyLimiter | None = None,
        drain: bool = False,
        publish: Callable[[dict[str, Any], list[str]], None] = lambda ledger, warnings: None,
        figures: Callable[[], dict[str, float]] = dict,
        recorder: Recorder | None = None,
        save: Callable[[ServiceState], bytes] | None = None,
    ) -> None:
        """`publish` receives the ledger and the warnings at every version; `figures` returns further figures for a
        batch; `save` encodes a snapshot that includes the state."""
        self._buffer, self._client, self._api_key = buffer, client, api_key
        self._evaluations, self._drain = evaluations, drain
        self._limiter, self._waited = limiter or UnboundedConcurrency(), False
        self._changed = asyncio.Condition()
        self._audit, self._publish, self._more_figures = Audit(), publish, figures
        self._recorder = recorder or Recorder()
        self._rewards: list[float] = []
        self._drawn, self._reused = 0, 0
        self._playing: dict[Ticket, _Group] = {}
        self._save, self._released = save, asyncio.Event()
        self._encoded: _Encoded | None = None
        self._retried: Counter[str] = Counter()
        self._tokens_reported: Counter[str] = Counter()
        self._checked = 0.0
        self._error: Exception = AsyncRLError()
        self._failed = asyncio.Event()

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
        self._recorder.admitted(ticket, prompt.uid, len(siblings))
        self._playing[ticket] = _Group(PromptName(prompt.uid, prompt.task, prompt.index), siblings)

    async def commit(self, ticket: Ticket, group: Group) -> None:
        """Hand in a finished group; engines may have generated more tokens for it than its agent kept."""
        discarded = sum(self._close(ticket)) - group.num_tokens
        seated = self._buffer.commit(ticket, group, discarded=discarded)
        self._recorder.committed(ticket, group, discarded)
        rewards = [trajectory.total for trajectory in group.trajectories]
        self._rewards += rewards
        lengths = [trajectory.num_tokens for trajectory in group.trajectories]
        self._audit.note(ticket.cohort, ticket.uid, lengths, rewards, trained=seated)
        await self._ended()

    async def reject(self, ticket: Ticket, reason: str, group: Group | None = None) -> None:
        """Reject a group, with the tokens that engines generated for it; its slot will be replayed. Pass `group` if it
        was played to its end."""
        received = self._close(ticket)
        self._buffer.reject(ticket, reason, tokens=sum(received))
        self._recorder.rejected(ticket, reason, sum(received), group)
        rewards = [trajectory.total for trajectory in group.trajectories] if group else []
        self._audit.note(ticket.cohort, ticket.uid, received, rewards, trained=False)
        await self._ended()

    def _close(self, ticket: Ticket) -> list[int]:
        """Close the sessions and return the tokens that engines generated for each sibling."""
        return [session.close() for session in self._playing.pop(ticket).siblings]

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

    # -- called by the trainer -----------------------------------------------------------------------------

    async def batch(self, request: Request) -> Response:
        """Return the next batch, waiting up to POLL_SECONDS for it."""
        version = int(request.query_params["version"])
        reader, readers = int(request.query_params.get("reader", 0)), int(request.query_params.get("readers", 1))
        if not 0 <= reader < readers:
            return PlainTextResponse(f"reader {reader} of {readers}: they are numbered from 0", status_code=400)
        try:
            async with asyncio.timeout(POLL_SECONDS), self._changed:
                while (encoded := self._batch(version)) is None:
                    if version != self._buffer.step:
                        return PlainTextResponse(
                            f"the next batch is {self._buffer.step}, not {version}", status_code=409
                        )
                    self._waited = True
                    await self._changed.wait()
        except TimeoutError:
            return PlainTextResponse(self.waiting_for(), status_code=202)
        encoded.readers.add(reader)
        await self._wake()  # wakes other readers, and `unwanted` for groups that the batch left behind
        return Response(encoded.data, media_type="application/msgpack")

    def _batch(self, version: int) -> _Encoded | None:
        """Take the batch from the buffer once, and keep it until the next version is published: a reader may
        disconnect."""
        if self._encoded and self._encoded.version == version:
            return self._encoded
        if version != self._buffer.step or not self.may_take() or (groups := self._buffer.take()) is None:
            return None
        self._limiter.taken(self._buffer.ready, len(groups), waited=self._waited)
        self._waited = False
        for dropped in self._buffer.dropped():
            self._audit.drop(dropped.uid)
        batch = Batch(version, groups, self._figures())
        self._recorder.taken(version, groups, batch.rollout)
        self._encoded = _Encoded(version, encode(batch))
        return self._encoded

    def may_take(self) -> bool:
        """Return whether a batch may be taken as soon as the buffer allows it."""
        return True

    async def may_publish(self, version: int) -> None:
        """Wait until a published version may open admission."""

    async def hold(self, _: Request) -> Response:
        """Hold new requests back; in a drain, wait up to POLL_SECONDS until those in flight are answered."""
        self._client.inflight.hold()
        if self._drain and not await self._client.inflight.drained(POLL_SECONDS):
            return PlainTextResponse(self.waiting_for(), status_code=202)
        return Response()

    async def version(self, request: Request) -> Response:
        """Record that a version is published."""
        told = await request.json()
        version = int(told["version"])
        self._reused = int(told.get("reused", 0))
        await self.may_publish(version)
        new = version != self._buffer.version  # the same version again: weights were resent, nothing was trained
        if new:
            self._buffer.publish(version)
            self._encoded = None
        self._client.inflight.release(version)
        self._released.set()
        ledger = self.ledger()
        if new:
            self._recorder.published(version, ledger)
        self._audit.close(self._buffer.step - self._buffer.slack)
        self._publish({"version": version, **asdict(ledger)}, self._audit.warnings())
        await self._wake()
        if new:
            self._evaluations.published(version)
        return Response()

    async def evaluate(self, _: Request) -> Response:
        """Run an evaluation now, after one that may be running."""
        return JSONResponse(await self._evaluations.now())

    async def snapshot(self, request: Request) -> Response:
        """Return the whole rollout state, after everything recorded so far is flushed."""
        version = int((await request.json())["version"])
        if self._save is None or (self._buffer.version, self._buffer.step) != (version, version):
            return PlainTextResponse(f"it is no moment between version {version} and its batch", status_code=409)
        data = self._save(self.state())
        self._recorder.saved(version)
        await asyncio.to_thread(self._recorder.flush)
        return Response(data, media_type="application/msgpack")

    async def status(self, _: Request) -> Response:
        """Return the ledger, and why the next batch is not ready."""
        encoded = self._encoded
        return JSONResponse(
            {
                "version": self._buffer.version,
                "waiting_for": self.waiting_for(),
                "batch": encoded and {"version": encoded.version, "read_by": sorted(encoded.readers)},
                "ledger": asdict(self.ledger()),
            }
        )

    # -- checkpoint ----------------------------------------------------------------------------------------

    def state(self) -> ServiceState:
        """Return the state. Serialize it immediately: it shares its parts with the service."""
        flight = self._client.inflight
        outstanding = [
            Outstanding(ticket, group.prompt, [SiblingSnapshot(one.received, one.said()) for one in group.siblings])
            for ticket, group in self._playing.items()
        ]
        return ServiceState(
            self._buffer.state(),
            outstanding,
            self._audit.state(),
            self._drawn,
            self._reused,
            self._rewards,
            dict(self._retried),
            dict(self._tokens_reported),
            dict(flight.tokens),
            flight.late_tokens,
        )

    def restore(self, state: ServiceState) -> list[tuple[Ticket, PromptName, Sequence[GenerationSession]]]:
        """Restore a saved state, before anything has begun. Returns the groups that must be continued."""
        self._buffer.restore(state.buffer)
        self._client.inflight.resume(state.buffer.version, state.tokens, state.late)
        self._audit.restore(state.audit)
        self._drawn, self._reused, self._rewards = state.drawn, state.reused, state.rewards
        self._retried, self._tokens_reported = Counter(state.retried), Counter(state.reported)
        for one in state.outstanding:
            uid = one.ticket.uid
            sessions = [
                self._client.resume(uid, f"{uid} {number}", sibling.received, sibling.said)
                for number, sibling in enumerate(one.siblings)
            ]
            self._playing[one.ticket] = _Group(one.prompt, sessions)
        self.ledger()
        return [(ticket, group.prompt, group.siblings) for ticket, group in self._playing.items()]

    async def released(self) -> None:
        """Wait until the trainer reports that every engine serves its version."""
        await self._released.wait()

    # -- status and accounting -----------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Return the ledger after checking it. Raises LedgerError."""
        tokens, late = self._client.inflight.tokens, self._client.inflight.late_tokens
        running = sum(session.received for group in self._playing.values() for session in group.siblings)
        source = SourceCounts(self._drawn, tokens["training"], running, late, tokens["evaluation"], self._reused)
        ledger = self._buffer.ledger(source, dict(self._retried + self._client.inflight.figures.continued))
        ledger.check()
        self._checked = time.monotonic()
        return ledger

    def waiting_for(self) -> str:
        """Say why the next batch is not ready, and what the groups that have been silent longest are waiting for."""
        playing = [(ticket.cohort, ticket.uid, group.siblings) for ticket, group in self._playing.items()]
        due = [group for group in playing if group[0] <= self._buffer.due()]
        lines = slowest((uid, siblings) for _, uid, siblings in due or playing)
        return "; ".join([self._buffer.waiting_for(), *lines])

    def _figures(self) -> dict[str, float]:
        """Return the figures of the rollout side since the last batch."""
        seen = self._client.inflight.take_figures()
        self._retried.update(seen.continued)
        ledger = self.ledger()
        rewards, self._rewards = self._rewards, []
        tokens = Counter(generated=ledger.tokens.generated, evaluation=ledger.events.evaluation_tokens)
        since, self._tokens_reported = tokens - self._tokens_reported, tokens
        return {
            "tokens/generated": since["generated"],
            "tokens/evaluation": since["evaluation"],
            "tokens/running": ledger.tokens.running,
            "tokens/held": ledger.tokens.held,
            "tokens/rejected": ledger.tokens.rejected,
            "tokens/discarded": ledger.tokens.discarded,
            "samples/generated": len(rewards),
            "groups/running": ledger.groups.running,
            "groups/ready": ledger.groups.ready,
            "groups/rejected": sum(ledger.groups.rejected.values()),
            "groups/requeued": ledger.events.requeued,
            "time/engine_busy": seen.seconds_busy,
            **self._audit.figures(),
            **self._limiter.figures(),
            "prefix_cache/hit": seen.cached_tokens / max(1, seen.prompt_tokens),
            "tokens/refilled": seen.refilled_tokens,
            "tokens/inferred": seen.inferred_tokens,
            **{f"requests/{cause}": count for cause, count in seen.continued.items()},
            **self._more_figures(),
        }

    async def fail(self) -> None:
        """Raise the first internal error that a request met: it ends the process, not just the request."""
        await self._failed.wait()
        raise self._error

    def app(self) -> Starlette:
        """Build the app with its routes, behind the run's API key."""
        routes = [
            Route("/batch", self.batch),
            Route("/hold", self.hold, methods=["POST"]),
            Route("/version", self.version, methods=["POST"]),
            Route("/evaluate", self.evaluate, methods=["POST"]),
            Route("/snapshot", self.snapshot, methods=["POST"]),
            Route("/status", self.status),
            Route("/health", lambda _: Response()),
        ]
        return Starlette(
            routes=[Route(route.path, self._guarded(route.endpoint), methods=route.methods) for route in routes]
        )

    def _guarded(self, endpoint: Callable) -> Callable:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
                return PlainTextResponse("wrong or missing API key", status_code=401)
            try:
                answer = endpoint(request)
                return await answer if asyncio.iscoroutine(answer) else answer
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # noqa: BLE001  an unforeseen error, too, ends this process with its traceback
                self._error = error
                self._failed.set()
                text = str(error) if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
                return PlainTextResponse(text, status_code=500)

        return guarded
