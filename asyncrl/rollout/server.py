"""The rollout process's HTTP server: the only interface between trainer and rollouts.

    GET  /batch?version=v&part=i&parts=k
                            the batch that turns version v into v + 1, or part i of k, as msgpack; 202 and the reason
                            until it is ready. The same bytes, however often they are asked for, until version v + 1 is
                            published, and afterwards from the journal (rollout/journal.py)
    POST /hold              weights are about to change: hold new requests back; 202 while a drain is in progress
    POST /version {"version": v}    every engine serves v: release requests, open admission; returns what the
                            engines must keep (engine/served.py)
    POST /evaluate          answer the held-out questions; returns their lines of eval.jsonl, and 202 until then
    POST /snapshot {"version": v}   the whole rollout state for a checkpoint, as bytes; between a version and its batch
    GET  /status            the ledger, and what the next batch waits for
    GET  /health            200 once rollouts run

Extensions may add others (extension.py).

Back-pressure: one part is encoded at a time, and the next batch can be taken only after the version that this one makes
is published (with weights.overlap, the version before); and no more groups run than the buffer admits: (lead + 1)
batches, plus oversample.

The wait for a batch, a drain and an evaluation is bounded by POLL_SECONDS and repeated by the trainer, which owns the
deadline (rollout.batch_timeout). What waits for the processes that play (a publish, a snapshot) has no bound here: the
trainer's request has one. The trainer also repeats a request that this process died of, or before answering it, to the
process that replaces it: each of them changes nothing the second time. The state that an answer tells of is in the
journal before it is sent.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.engine.inflight import InFlight
from asyncrl.errors import AsyncRLError, described
from asyncrl.network.addresses import times_restarted
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.groups import WrongBatch
from asyncrl.rollout.journal import NoJournal, StateKeeper
from asyncrl.rollout.snapshot import GroupsState, ResumableGroups
from asyncrl.schema import encode

POLL_SECONDS = 2.0
"""Between two polls a waiting trainer checks for restarted engines and routers (Fleet.reconcile)."""


class RolloutServer:
    """The interface of the groups to the trainer."""

    def __init__(
        self,
        groups: ResumableGroups,
        inflight: InFlight,
        evaluations: Evaluations | None,
        api_key: str,
        *,
        journal: NoJournal = NoJournal(),  # noqa: B008  it has no state
        drain: bool = False,
        save: Callable[[GroupsState, int], bytes] | None = None,
        number: int = 0,
    ) -> None:
        """`journal` keeps batches and snapshots for processes that start again; `drain` makes a hold wait for the
        requests in flight; `save` encodes a snapshot that includes the state, and its number; `number` is that of the
        snapshot with which this process has begun."""
        self.groups = groups
        self.inflight = inflight
        self._evaluations = evaluations
        self._journal = journal
        self._api_key = api_key
        self._drain = drain
        self.keeper = StateKeeper(groups, inflight, journal, save, number)
        self.starting = ""
        """What the start waits for; empty once rollouts run."""
        self.more: list[Route] = []
        """Further routes, which check for themselves who may call them."""
        self._encoded: dict[tuple[int, int], bytes] = {}
        """The part of a batch in training that was asked for last, by version and part."""
        self._error: Exception = AsyncRLError()
        self._failed = asyncio.Event()

    async def batch(self, request: Request) -> Response:
        """Return the next batch, waiting up to POLL_SECONDS for it."""
        version = int(request.query_params["version"])
        part, parts = int(request.query_params.get("part", 0)), int(request.query_params.get("parts", 1))
        if not 0 <= part < parts <= self.groups.batch_groups:
            return PlainTextResponse(
                f"there is no part {part} among {parts} of a batch of {self.groups.batch_groups} groups",
                status_code=400,
            )
        try:
            async with asyncio.timeout(POLL_SECONDS):
                batch = await self.groups.batch(version, part, parts)
        except WrongBatch as wrong:
            if (kept := await asyncio.to_thread(self._journal.read, version, part)) is not None:
                return Response(kept, media_type="application/msgpack")
            return PlainTextResponse(str(wrong), status_code=409)
        except TimeoutError:
            return PlainTextResponse(self.groups.waiting_for(), status_code=202)
        key = version, part
        if key not in self._encoded:
            data = encode(batch)
            if self._journal.enabled:
                await asyncio.to_thread(self._journal.keep, version, part, data)
                await self.keeper.keep()
            if key not in self._encoded:  # for another request, meanwhile
                self._encoded = {key: data}
        return Response(self._encoded[key], media_type="application/msgpack")

    async def hold(self, _: Request) -> Response:
        """Hold new requests back; in a drain, wait up to POLL_SECONDS until those in flight are answered."""
        self.inflight.hold()
        await asyncio.to_thread(self._journal.serves, self.groups.published_version, held=True)
        confirmed = await self.inflight.confirmed(POLL_SECONDS)
        if not confirmed or (self._drain and not await self.inflight.drained(POLL_SECONDS)):
            return PlainTextResponse(self.groups.waiting_for(), status_code=202)
        return Response()

    async def version(self, request: Request) -> Response:
        """Record that a version is published. Return what the engines must keep."""
        told = await request.json()
        version = int(told["version"])
        async with self.keeper.lock:
            if await self.groups.published(version):
                self._encoded = {key: data for key, data in self._encoded.items() if key[0] >= version}
                if self._evaluations:
                    self._evaluations.published(version)
        await asyncio.to_thread(self._journal.serves, version, held=False)
        return JSONResponse(msgspec.to_builtins(self.inflight.served.in_use(version)))

    async def evaluate(self, _: Request) -> Response:
        """Run an evaluation now, after one that may be running, and wait up to POLL_SECONDS for it."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                return JSONResponse(await self._evaluations.now() if self._evaluations else [])
        except TimeoutError:
            return PlainTextResponse("questions are not answered yet", status_code=202)

    async def snapshot(self, request: Request) -> Response:
        """Return the whole rollout state, after everything recorded so far is flushed."""
        version = int((await request.json())["version"])
        if (data := await self.keeper.snapshot(version)) is None:
            return PlainTextResponse(f"version {version} is not the newest, or its batch has begun", status_code=409)
        return Response(data, media_type="application/msgpack")

    async def status(self, _: Request) -> Response:
        """Return `state`."""
        return JSONResponse(self.state())

    def state(self) -> dict[str, Any]:
        """Return the ledger, and why the next batch is not ready."""
        return {
            "version": self.groups.published_version,
            "held": self.inflight.held,
            "restarts": times_restarted(),
            "waiting_for": self.starting or self.groups.waiting_for(),
            "batch": next((version for version, _ in self._encoded), None),
            "ledger": asdict(self.groups.ledger()),
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
        guarded = [Route(route.path, self.guarded(route.endpoint), methods=route.methods) for route in routes]
        return Starlette(routes=[*guarded, *self.more])

    def guarded(self, endpoint: Callable, *further: str) -> Callable:
        """Return an endpoint that only requests with the run's API key, or one of these further keys, may call, and
        whose unforeseen errors end this process."""
        keys = [f"Bearer {key}".encode() for key in (self._api_key, *further)]

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not any(hmac.compare_digest(given, key) for key in keys):
                return PlainTextResponse("wrong or missing API key", status_code=401)
            try:
                answer = endpoint(request)
                return await answer if asyncio.iscoroutine(answer) else answer
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # noqa: BLE001  an unforeseen error, too, ends this process with its traceback
                self._error = error
                self._failed.set()
                text = str(error) if isinstance(error, AsyncRLError) else described(error)
                return PlainTextResponse(text, status_code=500)

        return guarded
