"""Log-probabilities of given tokens, from the frozen engines of a teacher. No router stands before them.

A request prefills its token ids and writes none (`max_new_tokens` 0). SGLang 0.5.21 divides the logits of input tokens
by no temperature, whatever the request asks for (srt/layers/logprob_processor.py, InputLogprobProcessor): what comes is
at temperature 1. The first entry that it returns has no log-probability, so the start is one token early.

Requests of the same key go to the same engine while it answers, and find there what they share in its prefix cache
(rendezvous hashing, Thaler and Ravishankar 1998); the others take over from one that fails.

    waits for     a place among `max_running` requests; an engine (request_timeout)
    on a failure  another engine is asked at once; when all have failed, after growing delays, until retry_timeout
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from asyncrl.access import Access
from asyncrl.engine import sockets
from asyncrl.engine.answer import PASSING
from asyncrl.engine.client import FIRST_DELAY, LONGEST_DELAY
from asyncrl.engine.stream import Broken
from asyncrl.errors import DeadlineExceeded, EngineError

REST_SECONDS = 5.0
"""An engine that has failed is asked last for so long."""
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
class Figures:
    """Since they were last taken."""

    tokens: int = 0  # of the requests that were answered
    cached: int = 0  # of them, found in an engine's cache
    retried: int = 0


class TeacherEngines:
    """The only way to a teacher. One per rollout process."""

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
        self._urls = [url.rstrip("/") for url in urls]
        self._http = httpx.AsyncClient(
            **access.http,
            transport=transport or sockets.transport(access),
            timeout=httpx.Timeout(request_timeout, connect=min(30.0, request_timeout)),
        )
        self._room = asyncio.Semaphore(max_running)
        self._retry_timeout = retry_timeout
        self._failed_at: dict[str, float] = {}
        self._figures = Figures()

    async def logprobs(self, token_ids: list[int], start: int, key: str) -> list[float]:
        """log p(token | all before it) of token_ids[start:], natural logarithms at temperature 1; `start` is 1 or more.
        Raises EngineError when an engine refuses it, answers what it must not, or none answers in time."""
        clock = asyncio.get_running_loop().time
        failures, since = 0, math.inf
        while True:
            url = self._pick(key)
            try:
                async with self._room:
                    return await self._ask(url, token_ids, start)
            except Broken as broken:
                now = clock()
                self._failed_at[url] = now
                failures, since = failures + 1, min(since, now)
                if now - since > self._retry_timeout:
                    raise EngineError(
                        f"no engine of the teacher answered for {now - since:.0f} s, in {failures} attempts; the last, "
                        f"{url}: {broken} (teacher.retry_timeout)"
                    ) from None
            self._figures.retried += 1
            if failures % len(self._urls) == 0:  # all were asked
                delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(failures // len(self._urls) - 1, 16))
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))

    async def wait_until_ready(self, timeout: float) -> None:
        """Until every engine says that it serves. Raises DeadlineExceeded."""
        deadline = asyncio.get_running_loop().time() + timeout
        waiting = list(self._urls)
        while waiting := [url for url in waiting if not await self._serves(url)]:
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded("the engines of the teacher", timeout, f"not yet up: {waiting}; see logs/")
            await asyncio.sleep(POLL_SECONDS)

    def take_figures(self) -> Figures:
        """The figures since the last call."""
        taken, self._figures = self._figures, Figures()
        return taken

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _pick(self, key: str) -> str:
        """The key's own engine; those that have failed of late come last, the latest at the very end."""
        now = asyncio.get_running_loop().time()

        def rank(url: str) -> tuple[float, bytes]:
            failed = self._failed_at.get(url, -math.inf)
            return failed if now - failed < REST_SECONDS else -math.inf, hashlib.sha1(f"{url} {key}".encode()).digest()

        return min(self._urls, key=rank)

    async def _ask(self, url: str, token_ids: list[int], start: int) -> list[float]:
        """Raises Broken where another try may help."""
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
            raise Broken(f"{type(error).__name__} {error}".strip()) from None
        if response.status_code != 200:
            problem = f"{url} answered {response.status_code}: {response.text[:500]}"
            raise Broken(problem) if response.status_code in PASSING else EngineError(f"the teacher at {problem}")
        try:
            meta = _decode(response.content).meta_info
        except msgspec.DecodeError as error:
            raise Broken(f"no answer of an engine: {error}") from None
        if (reason := meta.finish_reason) and reason.type == "abort":
            problem = f"{url} aborted a request: {reason.message}"
            passes = reason.status_code is None or reason.status_code in PASSING
            raise Broken(problem) if passes else EngineError(f"the teacher at {problem}")
        self._figures.tokens += len(token_ids)
        self._figures.cached += meta.cached_tokens
        return _checked(meta.input_token_logprobs[1:], token_ids[start:], url)

    async def _serves(self, url: str) -> bool:
        try:
            return (await self._http.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet


def _checked(entries: list[tuple[float | None, int, str | None]], token_ids: list[int], url: str) -> list[float]:
    """The log-probabilities, if they are those of these tokens. SGLang tells the last id of a vocabulary as 0
    (srt/managers/scheduler_components/logprob_result_processor.py clips it)."""
    if len(entries) != len(token_ids):
        raise EngineError(f"the teacher at {url} scored {len(entries)} tokens of {len(token_ids)}")
    found = []
    for (logprob, told, _), token in zip(entries, token_ids, strict=True):
        if told not in (token, 0):
            raise EngineError(f"the teacher at {url} scored token {told} for token {token}")
        if logprob is None or not math.isfinite(logprob):
            raise EngineError(f"the teacher at {url} gives no log-probability for token {token}")
        found.append(logprob)
    return found
