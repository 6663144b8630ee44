"""Which engine answers a request that the router would cut: it passes on only the fields that it knows.

The router builds every request anew from its own record (sglang-router 0.3.2), so what is not in FORWARDED is lost in
silence. Such a request goes to an engine directly, and this picks it: the router's healthy workers by rendezvous hash
of the group (Thaler and Ravishankar 1998), so that a group keeps its engine and an engine that comes or goes moves only
its own groups; one that has more than its share of the requests in flight is passed over (bounded loads, Mirrokni et
al., arXiv 1608.01350).

    waits for     GET /workers, asked again every REFRESH_SECONDS and after an engine failed (the client's retries)
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import httpx

from asyncrl.engine.stream import Broken

FORWARDED = frozenset(
    {
        *("input_ids", "sampling_params", "stream", "rid", "extra_key", "priority", "lora_path", "session_params"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        *("return_hidden_states", "return_entropy", "custom_logit_processor", "custom_labels", "data_parallel_rank"),
    }
)
"""Fields of /generate that reach an engine through the router (held by tests/integration/test_choice.py)."""
REFRESH_SECONDS = 2.0
SHARE = 1.25
"""An engine may have this many times the mean number of requests in flight."""


class Engines:
    """The router's engines, for requests that go past it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._healthy: list[str] = []
        self._asked_at = -REFRESH_SECONDS
        self._asking = asyncio.Lock()
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def request_to(self, url: str) -> Iterator[None]:
        """Counts a request in flight; an engine that breaks it is not chosen until the router vouches for it anew."""
        self._in_flight[url] += 1
        try:
            yield
        except Broken:
            self._healthy = [other for other in self._healthy if other != url]
            raise
        finally:
            self._in_flight[url] -= 1

    async def pick(self, key: str) -> str:
        """URL of the engine for a routing key. Raises Broken when the router has none, or does not say."""
        await self._refresh()
        if not self._healthy:
            raise Broken("the router knows no healthy engine")
        return choose(key, {url: self._in_flight[url] for url in self._healthy})

    async def _refresh(self) -> None:
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._healthy and now - self._asked_at < REFRESH_SECONDS:
                return
            try:
                response = await self._http.get("/workers")
            except httpx.HTTPError as error:
                raise Broken(f"the router does not say who serves: {type(error).__name__} {error}") from None
            if response.status_code != 200:
                raise Broken(f"the router does not say who serves: {response.status_code} {response.text[:200]}")
            self._healthy = [worker["url"] for worker in response.json()["workers"] if worker.get("is_healthy")]
            self._asked_at = now


def choose(key: str, in_flight: dict[str, int]) -> str:
    """The engine of a key among those given with their requests in flight: the first, in the key's own order, that has
    room."""
    room = ceil(SHARE * (sum(in_flight.values()) + 1) / len(in_flight))
    ranked = sorted(in_flight, key=lambda url: hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest())
    return next(url for url in ranked if in_flight[url] < room)
