"""Client that gets log-probabilities of given tokens from the engines of a frozen teacher, which have no router.

A request prefills its token ids and generates none (`max_new_tokens` 0). SGLang 0.5.21 does not apply a temperature to
the logits of input tokens, whatever the request says (srt/layers/logprob_processor.py, InputLogprobProcessor), so the
log-probabilities are at temperature 1. The first entry that SGLang returns has no log-probability, so a request starts
one token early.

Requests with the same key go to the same engine while it answers, and find their common prefix in its cache (rendezvous
hashing, Thaler and Ravishankar 1998). When an engine fails, the others take over its requests.

    waits for     a free slot among `max_running` requests; an engine (request_timeout)
    on a failure  tries another engine at once; when all have failed, retries after growing delays until retry_timeout
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from asyncrl.engine.stream import PASSING, StreamBroken
from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.extensions.servers.choice import EquivalentServers
from asyncrl.network.addresses import Access
from asyncrl.network.connections import aiohttp_session

POLL_SECONDS = 0.2


class _Reason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    cached_tokens: int = 0


class _Answer(msgspec.Struct):
    meta_info: _Meta


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass
class TeacherStats:
    """Statistics since the last call of `take_figures`."""

    tokens: int = 0  # in the answered requests
    cached: int = 0  # those of them that were found in an engine's prefix cache
    retried: int = 0


def aiohttp_transport(access: Access) -> AiohttpTransport:
    """Return an httpx transport that uses aiohttp's connection pool.

    It replaces httpx's own pool, which searches all of its connections at every request.
    """
    return AiohttpTransport(client=partial(aiohttp_session, access))


class TeacherEngines:
    """Client of a teacher's engines. A rollout process has one, and uses the teacher only through it."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        access: Access,
        max_running: int,
        request_timeout: float,
        retry_timeout: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._servers = EquivalentServers(urls)
        self._http = httpx.AsyncClient(
            **access.http,
            transport=transport or aiohttp_transport(access),
            timeout=httpx.Timeout(request_timeout, connect=min(30.0, request_timeout)),
        )
        self._room = asyncio.Semaphore(max_running)
        self._retry_timeout = retry_timeout
        self._figures = TeacherStats()

    async def logprobs(self, token_ids: list[int], start: int, key: str) -> list[float]:
        """Return log p(token | all tokens before it) of token_ids[start:], as natural logarithms at temperature 1.

        `start` is 1 or more. Raises EngineError when an engine refuses the request or gives a wrong answer, or when no
        engine answers in time.
        """
        clock = asyncio.get_running_loop().time
        failures, since = 0, math.inf
        while True:
            url = self._servers.pick(lambda url: hashlib.sha1(f"{url} {key}".encode()).digest())
            try:
                async with self._room:
                    return await self._ask(url, token_ids, start)
            except StreamBroken as broken:
                now = clock()
                failures, since = failures + 1, min(since, now)
                if now - since > self._retry_timeout:
                    raise EngineError(
                        f"no engine of the teacher answered for {now - since:.0f} s, in {failures} attempts; the last, "
                        f"{url}: {broken} (teacher.retry_timeout)"
                    ) from None
            self._figures.retried += 1
            await self._servers.failed(url, failures)

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait until every engine is healthy. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        waiting = list(self._servers.urls)
        while waiting := [url for url in waiting if not await self._serves(url)]:
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded("the engines of the teacher", timeout, f"not yet up: {waiting}; see logs/")
            await asyncio.sleep(POLL_SECONDS)

    def take_figures(self) -> TeacherStats:
        """Return the statistics since the last call and reset them."""
        taken, self._figures = self._figures, TeacherStats()
        return taken

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask(self, url: str, token_ids: list[int], start: int) -> list[float]:
        """Send one request to one engine. Raises StreamBroken when a retry may help, and EngineError otherwise."""
        request = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        headers = {"Content-Type": "application/json"}
        try:
            response = await self._http.post(f"{url}/generate", content=msgspec.json.encode(request), headers=headers)
        except httpx.HTTPError as error:
            raise StreamBroken(f"{type(error).__name__} {error}".strip()) from None
        if response.status_code != 200:
            problem = f"{url} answered {response.status_code}: {response.text[:500]}"
            raise StreamBroken(problem) if response.status_code in PASSING else EngineError(f"the teacher at {problem}")
        try:
            meta = _decode(response.content).meta_info
        except msgspec.DecodeError as error:
            raise StreamBroken(f"no answer from an engine: {error}") from None
        if (reason := meta.finish_reason) and reason.type == "abort":
            problem = f"{url} aborted a request: {reason.message}"
            passes = reason.status_code is None or reason.status_code in PASSING
            raise StreamBroken(problem) if passes else EngineError(f"the teacher at {problem}")
        self._figures.tokens += len(token_ids)
        self._figures.cached += meta.cached_tokens
        return _checked(meta.input_token_logprobs[1:], token_ids[start:], url)

    async def _serves(self, url: str) -> bool:
        try:
            return (await self._http.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet


def _checked(entries: list[tuple[float | None, int, str | None]], token_ids: list[int], url: str) -> list[float]:
    """Return the log-probabilities of these tokens. Raises EngineError when the engine scored others or left some out.

    SGLang reports the last id of a vocabulary as 0, because it clips ids
    (srt/managers/scheduler_components/logprob_result_processor.py).
    """
    if len(entries) != len(token_ids):
        raise EngineError(f"the teacher at {url} scored {len(entries)} tokens of {len(token_ids)}")
    found = []
    for (logprob, told, _), token in zip(entries, token_ids, strict=True):
        if told not in (token, 0):
            raise EngineError(f"the teacher at {url} scored token {told} for token {token}")
        if logprob is None or not math.isfinite(logprob):
            raise EngineError(f"the teacher at {url} returned no log-probability for token {token}")
        found.append(logprob)
    return found
