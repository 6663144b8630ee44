"""Generate over HTTP: token ids in; token ids, log-probabilities and weight versions out.

Answers stream as disjoint pieces, so the client holds every token that an engine has sent. Version spans come with the
last piece only. New requests are held back while weights change (`hold` ... `release`), so that none runs under a
prefix-cache key older than its weights; requests in flight stay open.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from asyncrl.engine.answer import Answer, Piece, decode_piece, joined
from asyncrl.errors import EngineError
from asyncrl.types import Completion, Generate

MAX_RESUMES = 64
"""How often one answer may be aborted and continued: each time is an update, or the loss of an engine."""


@dataclass
class Figures:
    """What the client saw since it was last asked."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds_busy: float = 0.0  # at least one request in flight


class Client:
    """The only way to the model. One per rollout process."""

    def __init__(
        self,
        router: str,
        *,
        run: str,
        api_key: str,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        timeout: float,
        coalesce: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=router,
            headers={"Authorization": f"Bearer {api_key}"},
            transport=transport,
            trust_env=False,
            timeout=httpx.Timeout(timeout, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
        )  # keep-alive below uvicorn's 5 s: a connection that the server is closing must not be reused
        self._run, self._coalesce, self._temperature = run, coalesce, temperature
        self._sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": stop_token_ids,
            "skip_special_tokens": False,
        }
        self._serial = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self._waiting: dict[tuple, list[asyncio.Future[Completion]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._in_flight, self._busy_since = 0, 0.0
        self.version = 0
        self.figures = Figures()

    def generate(self, temperature: float | None = None) -> Generate:
        """The function that agents call; a temperature of 0 is greedy."""
        chosen = self._temperature if temperature is None else temperature

        async def generate(token_ids: list[int]) -> Completion:
            return await self._submit(token_ids, chosen)

        return generate

    def hold(self) -> None:
        """Keep new requests back: weights are about to change."""
        self._open.clear()

    def release(self, version: int) -> None:
        """Every engine serves `version`: let requests go, under its prefix-cache key."""
        self.version = version
        self._open.set()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _submit(self, token_ids: list[int], temperature: float) -> asyncio.Future[Completion]:
        """Siblings ask for the same prompt in the same turn of the event loop; they become one request of n samples."""
        loop = asyncio.get_running_loop()
        key = (
            (tuple(token_ids), temperature) if self._coalesce and temperature > 0 else (next(self._serial), temperature)
        )
        future: asyncio.Future[Completion] = loop.create_future()
        if key in self._waiting:
            self._waiting[key].append(future)
        else:
            self._waiting[key] = [future]
            loop.call_soon(self._start, key, token_ids, temperature)
        return future

    def _start(self, key: tuple, token_ids: list[int], temperature: float) -> None:
        futures = self._waiting.pop(key)
        task = asyncio.get_running_loop().create_task(self._answer(futures, token_ids, temperature))
        self._requests.add(task)  # the event loop keeps only a weak reference
        task.add_done_callback(self._requests.discard)
        for future in futures:  # when every sibling was cancelled nobody listens: end the request too
            future.add_done_callback(lambda _: task.cancel() if all(f.cancelled() for f in futures) else None)

    async def _answer(
        self, futures: list[asyncio.Future[Completion]], token_ids: list[int], temperature: float
    ) -> None:
        """Send one request and give each sibling its sample, or all of them the error."""
        try:
            answers = await self._stream(self._request(token_ids, temperature, len(futures)))
            completions = await asyncio.gather(*[self._whole(answer, token_ids, temperature) for answer in answers])
        except (httpx.HTTPError, EngineError, msgspec.DecodeError) as error:
            failure: Exception = EngineError(f"generation failed: {type(error).__name__} {error}".strip())
        except Exception as bug:  # noqa: BLE001  raised again in every sibling: a task's own error would be lost
            failure = bug
        else:
            self._count(answers)
            for future, completion in zip(futures, completions, strict=True):
                if not future.done():  # a cancelled sibling no longer listens
                    future.set_result(completion)
            return
        for future in futures:
            if not future.done():
                future.set_exception(failure)

    async def _whole(self, answer: Answer, token_ids: list[int], temperature: float) -> Completion:
        """An answer that was aborted under way goes on as a new request, from its last token."""
        parts = [answer]
        while parts[-1].aborted and len(parts) <= MAX_RESUMES:
            begun = [token for part in parts for token in part.token_ids]
            if ended := self._ended(begun):  # the engine sees an abort before it looks at the last token
                parts[-1].finish(ended)
                break
            request = self._request([*token_ids, *begun], temperature, 1)
            request["sampling_params"]["max_new_tokens"] -= len(begun)
            parts += await self._stream(request)
        return joined(parts)

    def _ended(self, token_ids: list[int]) -> str | None:
        """Why an answer of these tokens needs no more."""
        if token_ids and token_ids[-1] in self._sampling["stop_token_ids"]:
            return "stop"
        return "length" if len(token_ids) >= self._sampling["max_new_tokens"] else None

    async def _stream(self, request: dict) -> list[Answer]:
        """Every sample of one request, once weights are not changing."""
        answers = [Answer() for _ in range(request["sampling_params"]["n"])]
        await self._open.wait()
        request["extra_key"] = f"{self._run}-v{self.version}"  # prefix caches are never shared between versions or runs
        with self._busy():
            async for piece in self._pieces(request):
                if not 0 <= piece.index < len(answers):
                    raise EngineError(f"the engine answered sample {piece.index} of a request for {len(answers)}")
                answers[piece.index].add(piece)
        return answers

    def _count(self, answers: list[Answer]) -> None:
        self.figures.requests += 1
        for answer in answers:
            assert answer.last is not None
            self.figures.prompt_tokens += answer.last.prompt_tokens
            self.figures.cached_tokens += answer.last.cached_tokens

    def _request(self, token_ids: list[int], temperature: float, samples: int) -> dict:
        return {
            "input_ids": token_ids,
            "sampling_params": {**self._sampling, "temperature": temperature, "n": samples},
            "return_logprob": True,
            "stream": True,
            "rid": f"{self._run}-{next(self._serial):010d}",  # fixed width: engines abort by prefix
        }

    async def _pieces(self, request: dict) -> AsyncIterator[Piece]:
        """The server-sent events of one request."""
        async with self._http.stream(
            "POST",
            "/generate",
            content=msgspec.json.encode(request),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise EngineError(f"the router answered {response.status_code}: {text[:500]}")
            rest = b""
            async for chunk in response.aiter_raw():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    piece = decode_piece(data)
                    if piece.error is not None:
                        raise EngineError(f"the engine failed a request: {piece.error}")
                    yield piece

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Counts the time in which at least one request is in flight."""
        clock = asyncio.get_running_loop().time
        if self._in_flight == 0:
            self._busy_since = clock()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.figures.seconds_busy += clock() - self._busy_since

    def take_figures(self) -> Figures:
        """The figures since the last call."""
        now = asyncio.get_running_loop().time()
        if self._in_flight:
            self.figures.seconds_busy += now - self._busy_since
            self._busy_since = now
        taken, self.figures = self.figures, Figures()
        return taken
