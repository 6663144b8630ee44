"""The rollout process's HTTP service: the trainer's only door to it.

    GET  /batch?version=v   the batch that turns version v into v + 1, as msgpack; 202 and the reason until it is ready
    POST /hold              weights are about to change: keep new requests back; 202 while a drain goes on
    POST /version {"version": v}    every engine serves v: let requests go, open admission
    POST /evaluate          answer the held-out questions; returns their lines of eval.jsonl
    GET  /status            the ledger
    GET  /health            200 once rollouts run

Each wait here is bounded by POLL_SECONDS and repeated by the trainer, who owns the deadline (rollout.batch_timeout).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.engine.client import Client
from asyncrl.rollout.audit import Audit
from asyncrl.rollout.buffer import CohortBuffer, Ticket
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.types import Batch, Group, encode

POLL_SECONDS = 10.0


class Service:
    """The buffer with an event loop around it: whoever waits is woken by every change."""

    def __init__(
        self,
        buffer: CohortBuffer,
        client: Client,
        evaluations: Evaluations,
        api_key: str,
        *,
        drain: bool = False,
        publish: Callable[[dict[str, Any], list[str]], None] = lambda ledger, warnings: None,
    ) -> None:
        """`publish` gets the ledger, and what must be told, at every version."""
        self._buffer, self._client, self._api_key = buffer, client, api_key
        self._evaluations, self._drain = evaluations, drain
        self._changed = asyncio.Condition()
        self._audit, self._publish = Audit(), publish
        self._rewards: list[float] = []
        self._tokens_reported = 0

    # -- the worker's side ---------------------------------------------------------------------------------

    async def ticket(self) -> Ticket:
        """Wait for admission. Unblocked by a publish or a rejection."""
        async with self._changed:
            while (ticket := self._buffer.admit()) is None:
                await self._changed.wait()
            return ticket

    async def commit(self, ticket: Ticket, group: Group, received: int) -> None:
        """A group is ready; engines wrote `received` tokens for it, of which an agent may have kept fewer."""
        seated = self._buffer.commit(ticket, group, discarded=received - group.num_tokens)
        rewards = [trajectory.reward for trajectory in group.trajectories]
        self._rewards += rewards
        lengths = [trajectory.num_tokens for trajectory in group.trajectories]
        self._audit.note(ticket.cohort, lengths, rewards, trained=seated)
        await self._wake()

    async def reject(self, ticket: Ticket, reason: str, lengths: list[int], rewards: Sequence[float] = ()) -> None:
        """A group is lost, with the tokens that engines wrote for each sibling; its slot will be played anew."""
        self._buffer.reject(ticket, reason, tokens=sum(lengths))
        self._audit.note(ticket.cohort, lengths, list(rewards), trained=False)
        await self._wake()

    async def unwanted(self) -> list[tuple[Ticket, str]]:
        """Wait for groups that need not be played on, and the reason of their rejection."""
        async with self._changed:
            while not (unwanted := self._buffer.unwanted()):
                await self._changed.wait()
            return unwanted

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- the trainer's side --------------------------------------------------------------------------------

    async def batch(self, request: Request) -> Response:
        """The next batch, waiting up to POLL_SECONDS for it."""
        version = int(request.query_params["version"])
        if version != self._buffer.step:
            return PlainTextResponse(f"the next batch is {self._buffer.step}, not {version}", status_code=409)
        try:
            async with asyncio.timeout(POLL_SECONDS), self._changed:
                while (groups := self._buffer.take()) is None:
                    await self._changed.wait()
        except TimeoutError:
            return PlainTextResponse(self._buffer.waiting_for(), status_code=202)
        await self._wake()  # those that it left behind
        return Response(encode(Batch(version, groups, self._figures())), media_type="application/msgpack")

    async def hold(self, _: Request) -> Response:
        """Keep new requests back; in a drain, wait up to POLL_SECONDS until those in flight are answered."""
        self._client.inflight.hold()
        if self._drain and not await self._client.inflight.drained(POLL_SECONDS):
            return PlainTextResponse(self._buffer.waiting_for(), status_code=202)
        return Response()

    async def version(self, request: Request) -> Response:
        """A version is published."""
        version = int((await request.json())["version"])
        new = version != self._buffer.version  # the same version again: weights were sent anew, nothing was trained
        if new:
            self._buffer.publish(version)
        self._client.inflight.release(version)
        ledger = self._buffer.ledger()
        ledger.check()
        self._audit.close(self._buffer.step - self._buffer.slack)
        self._publish({**asdict(ledger), "version": version}, self._audit.warnings())
        await self._wake()
        if new:
            self._evaluations.published(version)
        return Response()

    async def evaluate(self, _: Request) -> Response:
        """Answer the held-out questions now, after an evaluation that may be under way."""
        return JSONResponse(await self._evaluations.now())

    async def status(self, _: Request) -> Response:
        """The ledger, and why the next batch is not ready."""
        return JSONResponse(
            {
                **asdict(self._buffer.ledger()),
                "version": self._buffer.version,
                "waiting_for": self._buffer.waiting_for(),
            }
        )

    def _figures(self) -> dict[str, float]:
        """What the rollout side did since the last batch."""
        seen, ledger = self._client.inflight.take_figures(), self._buffer.ledger()
        rewards, self._rewards = self._rewards, []
        generated = ledger.tokens_generated - self._tokens_reported
        self._tokens_reported = ledger.tokens_generated
        return {
            "tokens/generated": generated,
            "samples/generated": len(rewards),
            "groups/running": ledger.running,
            "groups/ready": ledger.ready,
            "groups/rejected": sum(ledger.rejected.values()),
            "time/engine_busy": seen.seconds_busy,
            **self._audit.figures(),
            "prefix_cache/hit": seen.cached_tokens / max(1, seen.prompt_tokens),
            "tokens/refilled": seen.refilled_tokens,
            "tokens/inferred": seen.inferred_tokens,
            **{f"requests/{cause}": count for cause, count in seen.continued.items()},
        }

    def app(self) -> Starlette:
        """The routes, behind the run's API key."""
        routes = [
            Route("/batch", self.batch),
            Route("/hold", self.hold, methods=["POST"]),
            Route("/version", self.version, methods=["POST"]),
            Route("/evaluate", self.evaluate, methods=["POST"]),
            Route("/status", self.status),
            Route("/health", lambda _: Response()),
        ]
        return Starlette(
            routes=[Route(route.path, self._guarded(route.endpoint), methods=route.methods) for route in routes]
        )

    def _guarded(self, endpoint: Callable) -> Callable:
        async def guarded(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {self._api_key}":
                return PlainTextResponse("wrong or missing API key", status_code=401)
            answer = endpoint(request)
            return await answer if asyncio.iscoroutine(answer) else answer

        return guarded
