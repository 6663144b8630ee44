"""Migration of long answers to engines with far fewer requests (rollout.migrate_after). Off by default.

The router knows how many requests each engine has, and sends a request with a new routing key to the one that has
fewest. If that is far fewer than another engine has, the longest answer leaves the other one: the engine is told to
abort it, and ends its stream with the versions, log-probabilities and experts of all tokens so far. The client
continues it, as it continues what a publish aborts (client.py), under a new routing key. Later turns stay there.

An answer stays where it is while requests are held back, while engines are lent, until it has had `after` tokens from
its engine, which also separates two moves, and once its limit leaves fewer than that.

waits for     the router's list of engines, every PERIOD seconds while some answer might move; an engine's confirmation
on a failure  of either, nothing moves. An engine that dies meanwhile breaks the stream, and the client continues it
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Mapping
from typing import Any, TypeVar

import httpx

from asyncrl.engine.inflight import InFlight
from asyncrl.engine.pending_sample import OpenRequest
from asyncrl.network.addresses import Access

PERIOD, TIMEOUT = 0.25, 5.0
"""Seconds between two looks at the router's list, which takes about 1 ms, and the timeout of each call."""
LEAST_LEFT = 16
"""Least number of tokens by which an answer must be below its limit, besides those of a chunk: SGLang refuses a prompt
that almost fills its context (client.RESERVED), and more tokens arrive until the engine has aborted it."""

E = TypeVar("E")  # an engine


class Migration:
    """Moves answers of one process."""

    def __init__(
        self,
        router: str,
        access: Access,
        inflight: InFlight,
        *,
        after: int,
        below: float,
        interval: int = 0,
        processes: int = 1,
        lent: Collection[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`after` and `below` are those of rollout.migrate_after and rollout.migrate_below, `interval` is
        engine.stream_interval. Each of `processes` moves answers of its own; `lent` are the URLs of the engines on the
        trainers' GPUs."""
        self._router, self._inflight, self._after, self._below = router, inflight, after, below
        self._left = max(after, LEAST_LEFT + interval)
        self._gap, self._lent = 2 * processes, frozenset(lent)
        self._http = httpx.AsyncClient(**access.http, timeout=TIMEOUT, transport=transport)

    async def run(self) -> None:
        """Move answers until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.check()

    async def check(self) -> None:
        """Move at most one answer from each engine."""
        if not self._movable():
            return
        loads = await self._loads()
        if self._inflight.holding or self._lent & loads.keys():
            return
        movable: dict[str, list[OpenRequest]] = {}
        for request in self._movable():
            movable.setdefault(request.engine, []).append(request)
        found = moves(loads, self._below, self._gap, movable)
        await asyncio.gather(*[self._end(max(movable[source], key=length)) for source, _ in found])

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _movable(self) -> list[OpenRequest]:
        return [request for request in self._inflight.requests if self._may_move(request)]

    def _may_move(self, request: OpenRequest) -> bool:
        exchange = request.samples[0].exchange
        if exchange.live is None or exchange.live.moving:
            return False
        left = exchange.limit - length(request)
        return len(exchange.live.token_ids) >= self._after and left >= self._left

    async def _loads(self) -> dict[str, int]:
        """Return the number of open requests of each engine, as the router counts them; empty if it does not answer."""
        try:
            response = await self._http.get(f"{self._router}/workers")
        except httpx.TransportError:
            return {}  # the router is dead or restarting
        workers: list[dict[str, Any]] = response.json()["workers"] if response.status_code == 200 else []
        return {one["url"]: one["load"] for one in workers if one["is_healthy"]}

    async def _end(self, request: OpenRequest) -> None:
        """Tell an engine to abort a request, so that it is continued elsewhere."""
        if not (live := request.samples[0].exchange.live):
            return  # it has ended meanwhile
        live.moving = True
        try:
            response = await self._http.post(f"{request.engine}/abort_request", json={"rid": request.rid})
            live.moving = response.status_code == 200
        except httpx.TransportError:
            live.moving = False


def moves(loads: Mapping[E, int], below: float, gap: int, having: Container[E]) -> list[tuple[E, E]]:
    """Return the engines between which an answer moves: from each of those `having` one that may, to the engine with
    the fewest requests, as long as that has fewer than `below` times as many, and at least `gap` fewer."""
    left, found = dict(loads), list[tuple[E, E]]()
    for source in sorted(loads, key=lambda engine: -loads[engine]):
        target = min(left, key=lambda engine: left[engine])
        if source in having and left[target] < below * left[source] and left[source] - left[target] >= gap:
            found.append((source, target))
            left[source] -= 1
            left[target] += 1
    return found


def length(request: OpenRequest) -> int:
    """Return the number of tokens of an answer so far."""
    exchange = request.samples[0].exchange
    parts = [*exchange.parts, *([exchange.live] if exchange.live else [])]
    return sum(len(part.token_ids) for part in parts)
