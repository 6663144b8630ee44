"""Counters of the engines: with engine.metrics, GET /metrics of each."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from asyncrl.engine.loads import MOST_NAMED
from asyncrl.extension import RolloutHooks
from asyncrl.extensions.counters.gpus import Gpus
from asyncrl.network.addresses import metrics_key

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import RolloutRun

SCRAPE_SECONDS, AT_ONCE = 2.0, 8
"""Least time between two queries of an engine's counters, for so many engines; with more of them the time grows. A
query takes 8 ms of the engine's CPU, and 1 ms here. Rates are those in between."""


@dataclass
class _Counters:
    """Counters of an engine when they were last queried, and what follows from the query before."""

    asked: float
    found: Mapping[str, float]
    rates: Mapping[str, float]


class Counters(RolloutHooks):
    """Adds to status.json and metrics.jsonl what the engines count, and what the GPUs of this machine do."""

    def start(self, run: RolloutRun) -> None:
        """Begin without any counters."""
        self._enabled = run.config.engine.metrics
        self._key = {"Authorization": f"Bearer {metrics_key(run.addresses.access.key)}"}
        self._counters: dict[str, _Counters] = {}
        self._gpus = Gpus()

    async def engines(self, http: httpx.AsyncClient, urls: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        """Return the rates of these engines, which are asked if their last query is long enough ago: `tokens_per_s`,
        the tokens generated per second since the query before; `cache_hit`, the fraction of the prompt tokens since
        then that was in the prefix cache; `preemptions`, the requests retracted so far because the cache was full."""
        if not self._enabled:
            return {}
        self._counters = {url: known for url, known in self._counters.items() if url in urls}
        await asyncio.gather(*[self._scrape(http, url, len(urls)) for url in urls])
        return {url: known.rates for url, known in self._counters.items()}

    async def _scrape(self, http: httpx.AsyncClient, url: str, engines: int) -> None:
        now, before = time.monotonic(), self._counters.get(url)
        if before and now - before.asked < SCRAPE_SECONDS * max(1.0, engines / AT_ONCE):
            return
        try:
            response = await http.get(f"{url}/metrics", headers=self._key, follow_redirects=True)
        except httpx.TransportError:
            return  # the engine is dead or restarting
        if response.status_code == 200:
            counters = counters_of(response.text)
            rates = rates_of(before.found, counters, now - before.asked) if before else {}
            self._counters[url] = _Counters(now, counters, rates)

    def status(self) -> Mapping[str, Any]:
        """Return what each GPU does now."""
        return {"gpus": self._gpus.sample()}

    def figures(self) -> dict[str, float]:
        """Return the rates of all engines together and of each of the first, and the means of the GPUs since the last
        call."""
        known = {url: one.rates for url, one in self._counters.items() if one.rates}
        figures = self._gpus.take_figures()
        if known:
            speeds = [rates["tokens_per_s"] for rates in known.values()]
            hits = [rates["cache_hit"] for rates in known.values() if "cache_hit" in rates]
            figures |= {
                "engines/tokens_per_s": sum(speeds),
                "engines/tokens_per_s/lowest": min(speeds),
                "engines/cache_hit": sum(hits) / max(1, len(hits)),
                "engines/preemptions": sum(rates["preemptions"] for rates in known.values()),
            }
        for url, rates in [*known.items()][:MOST_NAMED]:
            figures[f"engine/{urlsplit(url).netloc}/tokens_per_s"] = rates["tokens_per_s"]
        return figures


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
