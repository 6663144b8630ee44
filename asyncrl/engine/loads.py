"""Load of the engines: GET /v1/loads, which SGLang answers from shared memory without involving its scheduler."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access

TIMEOUT = 5.0
"""Deadline of a query in seconds. An engine that does not answer in time is left out."""
MOST_NAMED = 16
"""Largest number of engines that get metrics of their own in metrics.jsonl."""


@dataclass(frozen=True)
class Load:
    """Load of one engine, as the engine reports it."""

    running: int
    waiting: int
    used: float
    """Tokens that running requests hold in the KV cache."""
    capacity: float
    """Size of the KV cache in tokens."""
    prefilled: float
    """Tokens prefilled so far, without those found in the cache."""
    prefill_seconds: float
    """Time spent on prefilling them."""
    url: str = ""
    longest: float = 0.0
    """Size of the smallest KV cache of the engine's replicas, which bounds the length of a sequence."""
    more: Mapping[str, float] = field(default_factory=dict)
    """What extensions know of the engine."""


More = Callable[[httpx.AsyncClient, Sequence[str]], Awaitable[Mapping[str, Mapping[str, float]]]]
"""Returns what an extension knows of engines, by URL (RolloutHooks.engines)."""


class Loads:
    """Client that queries every engine that the router currently knows."""

    def __init__(
        self, router: str, access: Access, transport: httpx.AsyncBaseTransport | None = None, more: Sequence[More] = ()
    ) -> None:
        self._router, self._more = router, more
        self._http = httpx.AsyncClient(**access.http, timeout=TIMEOUT, transport=transport)
        self._asked = -math.inf
        self.latest: list[Load] = []
        """What the last query returned."""

    async def recent(self, age: float) -> list[Load]:
        """Return the loads that are at most `age` seconds old: those of the last query, or of a new one."""
        return self.latest if time.monotonic() - self._asked < age else await self.ask()

    async def ask(self) -> list[Load]:
        """Return the loads of the engines that answer. Raises EngineError when one does not have the endpoint."""
        try:
            response = await self._http.get(f"{self._router}/workers")
        except httpx.TransportError:
            return []  # the router is dead or restarting
        workers = response.json()["workers"] if response.status_code == 200 else []
        loads = await asyncio.gather(*[self._ask(worker["url"]) for worker in workers])
        self.latest, self._asked = await self._with_more([load for load in loads if load]), time.monotonic()
        return self.latest

    async def _with_more(self, loads: list[Load]) -> list[Load]:
        for ask in self._more:
            if known := await ask(self._http, [load.url for load in loads]):
                loads = [replace(load, more={**load.more, **known.get(load.url, {})}) for load in loads]
        return loads

    async def _ask(self, url: str) -> Load | None:
        try:
            response = await self._http.get(f"{url}/v1/loads", params={"include": "core"})
        except httpx.TransportError:
            return None  # the engine is dead or restarting
        if response.status_code == 404:
            raise EngineError(f"{url} does not report its load (GET /v1/loads): SGLang 0.5.21 or newer is needed")
        if response.status_code != 200:
            return None
        return load_of(response.json()["loads"], url)

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl; none while no engine answers."""
        loads = self.latest
        metrics: dict[str, float] = {}
        if loads:
            metrics = {
                "engines/running": sum(load.running for load in loads),
                "engines/queued": sum(load.waiting for load in loads),
                "engines/cache_use": sum(load.used for load in loads) / max(1.0, sum(load.capacity for load in loads)),
            }
        return metrics | {name: one for load in loads[:MOST_NAMED] for name, one in _own(load).items()}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _own(load: Load) -> dict[str, float]:
    """Return the figures of one engine, under its host and port."""
    figures = {
        "running": load.running,
        "queued": load.waiting,
        "cache_use": load.used / max(1.0, load.capacity),
    }
    place = urlsplit(load.url).netloc
    return {f"engine/{place}/{name}": value for name, value in figures.items()}


def load_of(ranks: Sequence[dict[str, Any]], url: str = "") -> Load:
    """Return an engine's load: the sum over its data-parallel ranks."""

    def total(name: str) -> float:
        return float(sum(rank[name] for rank in ranks))

    return Load(
        running=int(total("num_running_reqs")),
        waiting=int(total("num_waiting_reqs")),
        used=total("num_used_tokens"),
        capacity=total("max_total_num_tokens"),
        prefilled=total("total_prefill_uncached_tokens"),
        prefill_seconds=total("total_prefill_busy_us") / 1e6,
        url=url,
        longest=min(float(rank["max_total_num_tokens"]) for rank in ranks),
    )
