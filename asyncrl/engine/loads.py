"""Load and counters of the engines: GET /v1/loads, which SGLang answers from shared memory without involving its
scheduler, and with engine.metrics its Prometheus counters, GET /metrics."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access, metrics_key

TIMEOUT = 5.0
"""Deadline of a query in seconds. An engine that does not answer in time is left out."""
SCRAPE_SECONDS, AT_ONCE = 2.0, 8
"""Least time between two queries of an engine's counters, for so many engines; with more of them the time grows. A
query takes 8 ms of the engine's CPU, and 1 ms here. Rates are those in between."""
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
    tokens_per_s: float | None = None
    """Tokens generated per second, between the last two queries of the counters."""
    cache_hit: float | None = None
    """Fraction of the prompt tokens in between that the engine found in its prefix cache."""
    preemptions: float | None = None
    """Number of requests that the engine has retracted because its cache was full."""


@dataclass
class _Counters:
    """Counters of an engine when they were last queried, and what follows from the query before."""

    asked: float
    found: Mapping[str, float]
    rates: Mapping[str, float]


class Loads:
    """Client that queries every engine that the router currently knows."""

    def __init__(
        self, router: str, access: Access, transport: httpx.AsyncBaseTransport | None = None, *, metrics: bool = False
    ) -> None:
        """`metrics` says that the engines have counters (engine.metrics)."""
        self._router, self._metrics = router, metrics
        self._key = {"Authorization": f"Bearer {metrics_key(access.key)}"}
        self._http = httpx.AsyncClient(**access.http, timeout=TIMEOUT, transport=transport)
        self._counters: dict[str, _Counters] = {}
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
        self.latest, self._asked = [load for load in loads if load], time.monotonic()
        return self.latest

    async def _ask(self, url: str) -> Load | None:
        try:
            response = await self._http.get(f"{url}/v1/loads", params={"include": "core"})
            if self._metrics:
                await self._scrape(url)
        except httpx.TransportError:
            return None  # the engine is dead or restarting
        if response.status_code == 404:
            raise EngineError(f"{url} does not report its load (GET /v1/loads): SGLang 0.5.20 or newer is needed")
        if response.status_code != 200:
            return None
        counters = self._counters.get(url)
        rates: Any = counters.rates if counters else {}
        return replace(load_of(response.json()["loads"], url), **rates)

    async def _scrape(self, url: str) -> None:
        now, before = time.monotonic(), self._counters.get(url)
        if before and now - before.asked < SCRAPE_SECONDS * max(1.0, len(self.latest) / AT_ONCE):
            return
        response = await self._http.get(f"{url}/metrics", headers=self._key, follow_redirects=True)
        if response.status_code == 200:
            counters = counters_of(response.text)
            rates = rates_of(before.found, counters, now - before.asked) if before else {}
            self._counters[url] = _Counters(now, counters, rates)

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics.jsonl; none while no engine answers."""
        loads = self.latest
        rates = [load.tokens_per_s for load in loads if load.tokens_per_s is not None]
        metrics: dict[str, float] = {}
        if loads:
            metrics = {
                "engines/running": sum(load.running for load in loads),
                "engines/queued": sum(load.waiting for load in loads),
                "engines/cache_use": sum(load.used for load in loads) / max(1.0, sum(load.capacity for load in loads)),
            }
        if rates:
            hits = [load.cache_hit for load in loads if load.cache_hit is not None]
            metrics |= {
                "engines/tokens_per_s": sum(rates),
                "engines/tokens_per_s/lowest": min(rates),
                "engines/cache_hit": sum(hits) / max(1, len(hits)),
                "engines/preemptions": sum(load.preemptions or 0.0 for load in loads),
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
        "tokens_per_s": load.tokens_per_s,
    }
    place = urlsplit(load.url).netloc
    return {f"engine/{place}/{name}": value for name, value in figures.items() if value is not None}


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


_COUNTER = re.compile(r"^sglang[:_](realtime_tokens|num_retracted_requests)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_MODE = re.compile(r'mode="(\w+)"')


def counters_of(text: str) -> dict[str, float]:
    """Return an engine's counters by name: "decode", "prefill_compute" and "prefill_cache" tokens, and "retracted"
    requests. The rest of the text, of a thousand lines, is skipped."""
    counters: Counter[str] = Counter()
    for _, labels, value in _COUNTER.findall(text):
        mode = _MODE.search(labels)
        counters[mode[1] if mode else "retracted"] += float(value)  # type: ignore[assignment]
    return dict(counters)


def rates_of(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return what follows from two queries of the counters. Those of an engine that was restarted begin at 0."""
    restarted = any(now.get(name, 0.0) < value for name, value in before.items())
    grown = {name: value - (0.0 if restarted else before.get(name, 0.0)) for name, value in now.items()}
    computed, cached = grown.get("prefill_compute", 0.0), grown.get("prefill_cache", 0.0)
    return {
        "tokens_per_s": grown.get("decode", 0.0) / seconds,
        **({"cache_hit": cached / (cached + computed)} if cached + computed else {}),
        "preemptions": now.get("retracted", 0.0),
    }
