"""HTTP client for generation: it sends token ids, and receives token ids, log-probabilities and, with the last chunk,
weight versions (session.py).

Siblings that share an engine and request the same prompt at the same time share one request with n samples. Answers
stream as disjoint chunks, so the client holds every token that an engine has sent. When an answer is interrupted (by a
weight update that aborts it, the death of an engine or of the router, a connection reset, a 503), the client requests
the rest, starting after the last token that it received.

    waits for     the answers to open requests (engine/inflight.py)
    on a failure  retries with exponential backoff; when no token has arrived for retry_timeout, the request fails with
                  the reason
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.engine.inflight import CacheKey, InFlight
from asyncrl.engine.served import ServedWeights
from asyncrl.engine.session import GenerationSession, PartialAnswer, Purpose, Request, joined, seed_of
from asyncrl.engine.stop_strings import StopStrings
from asyncrl.engine.stream import GenerateEndpoint, Headers, no_headers
from asyncrl.errors import AsyncRLError, EngineError, PromptRefused
from asyncrl.extension import PlayerHooks
from asyncrl.images import ImageReader, images_in
from asyncrl.observability.intervals import RETRY
from asyncrl.retries import Patience
from asyncrl.schema import Completion, Message

RESERVED = 7
"""Least number of tokens by which a prompt must be shorter than an engine's context. SGLang refuses a prompt of
context - 6 or more tokens (0.5.21: managers/tp_worker.py, get_worker_info, and managers/utils.py,
validate_input_length)."""

FORBIDDEN = -1e4
"""Bias of the logits of tokens that must not be sampled. Log-probabilities are those of the rest of the vocabulary."""


@dataclass(frozen=True)
class ClientSettings:
    """What is fixed for a run: how answers are sampled, and what requests to its engines have."""

    run: str
    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]
    retry_timeout: float
    coalesce: bool
    """Siblings share a request; not with a seed, and not with stop strings, because each is then aborted by itself."""
    spread: bool | Literal["auto"] = False
    """Send siblings to different engines (rollout.spread_siblings)."""
    cache_key: CacheKey = "version"
    pause_mode: str = "in_place"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further sampling parameters of each request, in a run that trains nothing."""
    hooks: Sequence[PlayerHooks] = ()
    """Extensions, which may ask engines for more of each token."""
    replicas: int = 1
    """Replicas of attention in each engine. Requests with the same routing key use the same one."""
    seed: int | None = None
    """Give every sample its own seed, derived from this one and the sample's name."""
    context: int | None = None
    """Maximum length of a sequence in an engine, in tokens."""
    vocabulary: int | None = None
    """Size of the model's vocabulary; prompts with other tokens are refused."""
    images: ImageReader = field(default_factory=ImageReader)
    """How the model reads images, if it does."""
    requests: str = ""
    """Begins the names of requests, which must differ from those of other processes of the run."""
    stop: StopStrings = field(default_factory=StopStrings)
    """Texts that end every answer; a request may have further ones."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of every request, which keep an answer free of placeholders: with one, it would be a
        prompt with more placeholders than images in the next turn."""
        sampling: dict[str, Any] = {**self.further, "stop_token_ids": self.stop_token_ids, "skip_special_tokens": False}
        if self.images.forbidden:
            sampling["logit_bias"] = {str(token): FORBIDDEN for token in self.images.forbidden}
        return sampling


SPREAD_FROM, RECENT = 4, 256
"""Ratio of the mean answer to the prompt from which siblings are spread; number of answers in the mean."""


class SiblingSpread:
    """Decides whether the siblings of a group share an engine, which prefills their prompt once, or are spread over the
    engines with the fewest requests.

    Spread, they even out the load, so that the longest answers, for which batches wait, share no engine with more
    others than necessary. In simulation this gave 3.6 % more throughput with a short prompt (sigma 0.9, bound 4,
    prefill 6 times as fast as decoding), 2.5 % with one of a quarter of the mean answer, and nothing with half of it.
    """

    def __init__(self, spread: bool | Literal["auto"]) -> None:
        self._spread = spread
        self._answers = 0
        self._mean = 0.0

    def finished(self, tokens: int) -> None:
        """Record the length of an answer."""
        self._answers = min(self._answers + 1, RECENT)
        self._mean += (tokens - self._mean) / self._answers

    def __call__(self, prompt: int) -> bool:
        """Return whether the siblings with a prompt of so many tokens are spread. auto: if recent answers are much
        longer."""
        return SPREAD_FROM * prompt <= self._mean if self._spread == "auto" else self._spread


class GenerationClient:
    """Client of the policy's engines. A rollout process has one, and uses the model only through it."""

    def __init__(
        self,
        http: GenerateEndpoint,
        settings: ClientSettings,
        headers: Headers = no_headers,
        served: ServedWeights | None = None,
    ) -> None:
        """`headers` makes further headers of a request; `served` chooses what answers it."""
        self._http = http
        self._settings = settings
        self.inflight = InFlight(http, settings, headers, served or ServedWeights())
        self.temperature = settings.temperature
        self._context = settings.context
        self._coalesce = settings.coalesce and settings.seed is None and self.inflight.served.shared
        self._spread = SiblingSpread(settings.spread)
        self._serial = itertools.count()
        self._waiting: dict[tuple, list[Request]] = {}
        self._tasks: dict[asyncio.Task[None], list[Request]] = {}

    def generate(
        self,
        temperature: float | None = None,
        *,
        group: str = "",
        purpose: Purpose = "training",
        sample: str = "",
        pinned: int | None = None,
        born: int | None = None,
    ) -> GenerationSession:
        """Return a session for one episode. A temperature of 0 is greedy.

        Siblings have the same `group`, which was admitted at version `born` (unset: the newest); `sample` names each of
        them. The caller holds the version that it gives as `pinned` (engine/served.py).
        """
        seed = self._settings.seed
        return GenerationSession(
            self,
            group,
            self.temperature if temperature is None else temperature,
            purpose,
            None if seed is None else seed_of(f"{seed} {purpose} {sample}"),
            sample=sample,
            born=self.inflight.version if born is None else born,
            pinned=pinned,
        )

    async def close(self) -> None:
        """Cancel the requests that are still open, and close the connections."""
        open_requests = list(self._tasks)
        for task in open_requests:
            task.cancel()
        await asyncio.gather(*open_requests, return_exceptions=True)
        await self._http.close()
        self._settings.images.close()

    # -- requests of siblings ------------------------------------------------------------------------------

    def submit(
        self,
        session: GenerationSession,
        token_ids: list[int],
        most: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
        stop: Sequence[str] = (),
    ) -> asyncio.Future[Completion]:
        """Submit a request and return the future of its completion. Raises PromptRefused for a token that the model
        does not have, and ImageRefused if there is not an image for each placeholder.

        Siblings that submit the same prompt in the same iteration of the event loop share one request.
        """
        loop = asyncio.get_running_loop()
        self._check_tokens(token_ids)
        added = self._settings.images.added(token_ids, images)
        limit = self._limit(len(token_ids) + added, most)
        if not session.routing_key:
            alone = session.sample and self._spread(len(token_ids) + added)
            session.routing_key = session.sample if alone else session.group
        stops = self._settings.stop.and_also(stop) if stop else self._settings.stop
        request = Request(session, token_ids, limit, session.next_seed, role, session.purpose, images, added, stops)
        self.inflight.served.assign(request, self.inflight.version)
        session.requests.append(request)
        request.future = loop.create_future()
        recalled = session.recall(request)
        if recalled is not None:
            self._go_on(request, recalled)
        elif limit < 1:
            self._complete(request, Completion([], [], [], "length"))
        else:
            key: tuple = (next(self._serial),)
            shares = self._coalesce and not request.stop.texts
            if shares and session.temperature > 0 and session.routing_key == session.group:
                served_by = request.model, request.pinned, request.purpose
                key = (session.group, session.temperature, limit, served_by, tuple(token_ids), *images)
            self.inflight.served.acquire(request.holds)
            if key not in self._waiting:
                self._waiting[key] = []
                loop.call_soon(self._start, key)
            self._waiting[key].append(request)
        return request.future

    def _check_tokens(self, token_ids: list[int]) -> None:
        """Raise PromptRefused for a token that is not in the vocabulary: SGLang's embedding would raise IndexError,
        which ends the engine, and then the next one that gets the request."""
        size = self._settings.vocabulary
        if size is None or not token_ids:
            return
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < size:
                raise PromptRefused(
                    f"the prompt has token {token}, but the model's vocabulary has {size} tokens: use ids from 0 to "
                    f"{size - 1}"
                )

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the images of messages in order, as the model reads them. Raises ImageRefused."""
        begun = [self._settings.images.begin(image) for image in images_in(messages)]
        return [await asyncio.wrap_future(image) for image in begun]

    def narrow(self, context: int) -> None:
        """Lower the maximum length of a sequence to the KV cache of an engine, in tokens."""
        self._context = min(self._context or context, context)

    def _limit(self, asked: int, most: int | None) -> int:
        """Return the maximum length of an answer to a prompt of `asked` tokens; 0 or less means no room."""
        longest = self._settings.max_new_tokens
        limit = longest if most is None else min(most, longest)
        if self._context is None:
            return limit
        return min(limit, self._context - 2 - asked) if asked <= self._context - RESERVED else 0

    def _start(self, key: tuple) -> None:
        requests = self._waiting.pop(key)
        self._watch(self._answer(requests), requests)

    def _watch(self, answering: Coroutine[Any, Any, None], requests: list[Request]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks[task] = requests  # the event loop keeps only a weak reference
        task.add_done_callback(self._settle)
        futures = [request.future for request in requests if request.future]
        for future in futures:  # cancel the request when nobody waits for it any more
            future.add_done_callback(lambda _: task.cancel() if _left_alone(futures) else None)

    def _go_on(self, request: Request, recalled: Completion) -> None:
        """Give a request its recalled completion, which is continued from its last token if it is incomplete."""
        if recalled.finish_reason:
            self._complete(request, recalled)
            return
        request.parts.append(PartialAnswer.recalled(request, recalled))
        self.inflight.served.acquire(request.holds)
        self._watch(self._finish(request), [request])

    async def _answer(self, requests: list[Request]) -> None:
        """Send one request with a sample for each sibling. A sibling proceeds as soon as its own sample is complete."""
        async with asyncio.TaskGroup() as answers:

            def finish(request: Request) -> None:
                answers.create_task(self._finish(request))

            await self.inflight.stream(requests, hand_over=finish)

    def _settle(self, task: asyncio.Task[None]) -> None:
        """End the use of a request's version, and pass its error to each sibling that has no answer yet.

        An EngineError stays an EngineError. Any other error counts as a bug of asyncrl, not as the agent's failure.
        """
        requests = self._tasks.pop(task)
        for request in requests:
            self.inflight.served.release(request.holds)
        if task.cancelled() or (error := task.exception()) is None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        for request in requests:
            if request.future and not request.future.done():
                failure = AsyncRLError(f"a bug in asyncrl: {error!r}")
                if isinstance(error, EngineError):
                    failure = EngineError(f"generation failed: {error}")
                failure.__cause__ = error
                request.future.set_exception(failure)

    def closed(self, session: GenerationSession) -> None:
        """End a session's use of the version that it kept. No-op if answers keep none."""
        if not self.inflight.served.pins:
            return
        self.inflight.served.closed(session)
        for requests in list(self._tasks.values()):
            for request in requests:
                if request.session is session and request.future:
                    request.future.cancel()

    # -- an answer and its continuations -------------------------------------------------------------------

    async def _finish(self, request: Request) -> None:
        """Complete an answer, after requesting continuations until nothing is missing."""
        patience = Patience(self._settings.retry_timeout)
        part = self._ended_part(request)
        while reason := part.cut:
            if part.broken and request.pinned is None:
                self.inflight.figures.inferred_tokens += len(part.token_ids)
            if ended := self._ended(request):  # it was complete, but its last chunk was lost
                part.ended = ended
                break
            with request.session.activity.spent(RETRY, reason):
                await patience.before_retry(reason, progressed=bool(part.token_ids))
            self.inflight.figures.continued["aborted" if reason == "aborted" else "broken"] += 1
            await self.inflight.stream([request])
            part = self._ended_part(request)
            if part.last:
                self.inflight.figures.refilled_tokens += part.last.prompt_tokens - part.last.cached_tokens
        completion = joined(request.parts, part.finish_reason)
        self._spread.finished(len(completion.token_ids))
        self._complete(request, completion)

    def _ended_part(self, request: Request) -> PartialAnswer:
        """Return the part of an answer that ended last, after extensions have read it."""
        for hooks in self._settings.hooks:
            hooks.part(request)
        return request.parts[-1]

    def _complete(self, request: Request, completion: Completion) -> None:
        """Give the agent its completion with what extensions have read of it."""
        for hooks in self._settings.hooks:
            completion = hooks.completed(request, completion)
        request.complete(completion)

    def _ended(self, request: Request) -> str | None:
        """Return the finish reason of an answer whose parts have ended, or None when it is not complete."""
        written = request.token_ids
        stops = request.stop
        if written and written[-1] in self._settings.stop_token_ids:
            return "stop"
        if stops.texts and stops.end(written, len(written)):
            return "stop"
        return "length" if len(written) >= request.limit else None


def _left_alone(futures: list[asyncio.Future[Completion]]) -> bool:
    """Return whether no future is pending and at least one was cancelled."""
    return all(future.done() for future in futures) and any(future.cancelled() for future in futures)
