"""Load of the engines (GET /v1/loads), which SGLang reports from shared memory without involving its scheduler."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access

TIMEOUT = 5.0
"""Deadline of a query in seconds. An engine that does not answer in time is left out."""


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


class Loads:
    """Client that queries every engine that the router currently knows."""

    def __init__(self, router: str, access: Access, transport: httpx.AsyncBaseTransport | None = None):
        self._router = router
        self._http = httpx.AsyncClient(**access.http, timeout=TIMEOUT, transport=transport)
        self._latest: list[Load] = []
        self._asked = -math.inf

    async def recent(self, age: float) -> list[Load]:
        """Return the loads that are at most `age` seconds old: those of the last query, or of a new one."""
        return self._latest if time.monotonic() - self._asked < age else await self.ask()

    async def ask(self) -> list[Load]:
        """Return the loads of the engines that answer. Raises EngineError when one does not have the endpoint."""
        try:
            response = await self._http.get(f"{self._router}/workers")
        except httpx.TransportError:
            return []  # the router is dead or restarting
        urls = [worker["url"] for worker in response.json()["workers"]] if response.status_code == 200 else []
        found = await asyncio.gather(*[self._ask(url) for url in urls])
        self._latest, self._asked = [load for load in found if load], time.monotonic()
        return self._latest

    async def _ask(self, url: str) -> Load | None:
        try:
            response = await self._http.get(f"{url}/v1/loads", params={"include": "core"})
        except httpx.TransportError:
            return None  # the engine is dead or restarting
        if response.status_code == 404:
            raise EngineError(f"{url} does not report its load (GET /v1/loads): SGLang 0.5.20 or newer is needed")
        if response.status_code != 200:
            return None
        return load_of(response.json()["loads"], url)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


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
    )
