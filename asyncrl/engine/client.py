"""HTTP client for generation: it sends token ids, and receives token ids, log-probabilities and, with the last chunk,
weight versions (partial_completion.py).

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
from typing import Any, Literal

from asyncrl.config.roles import AgentsConfig
from asyncrl.engine.adapters import AdapterName, PastVersions, no_past
from asyncrl.engine.expert_routing import ExpertRoutingAssembler, known_rows
from asyncrl.engine.inflight import CacheKey, InFlight
from asyncrl.engine.partial_completion import Exchange, PartialCompletion, Purpose, StopStrings, joined
from asyncrl.engine.pending_sample import PendingSample
from asyncrl.engine.roles import ONE_ADAPTER, RoleAdapters
from asyncrl.engine.session import GenerationSession, SavedCompletion, SiblingSpread, seed_of
from asyncrl.engine.stream import GenerateEndpoint, Headers, no_headers
from asyncrl.errors import AsyncRLError, EngineError, PromptRefused
from asyncrl.images import ImageRefused
from asyncrl.images.decoder import Vision
from asyncrl.images.parts import images_in
from asyncrl.network.addresses import Access
from asyncrl.observability.intervals import RETRY
from asyncrl.retries import pause
from asyncrl.routing import RoutingShape
from asyncrl.schema import Completion, Message

RESERVED = 7
"""Least number of tokens by which a prompt must be shorter than an engine's context. SGLang refuses a prompt of
context - 6 or more tokens (0.5.21: managers/tp_worker.py, get_worker_info, and managers/utils.py,
validate_input_length)."""

FORBIDDEN = -1e4
"""Bias of the logits of tokens that must not be sampled. Log-probabilities are those of the rest of the vocabulary."""


NO_STOP = StopStrings([], lambda token_ids: "")


class GenerationClient:
    """Client of the policy's engines. A rollout process has one, and uses the model only through it."""

    def __init__(
        self,
        router: str,
        *,
        run: str,
        access: Access,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        timeout: float,
        retry_timeout: float,
        coalesce: bool,
        spread: bool | Literal["auto"] = False,
        cache_key: CacheKey = "version",
        pause_mode: str = "in_place",
        fields: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        routing: RoutingShape | None = None,
        replicas: int = 1,
        seed: int | None = None,
        context: int | None = None,
        vocabulary: int | None = None,
        names: AdapterName | None = None,
        adapter_per: Literal["completion", "episode"] = "completion",
        agents: AgentsConfig = ONE_ADAPTER,
        past_versions: PastVersions = no_past,
        vision: Vision | None = None,
        headers: Headers = no_headers,
        http: Any = None,
        requests: str = "",
        stop: StopStrings = NO_STOP,
    ) -> None:
        """Create a client of the router at `router`.

        spread: send siblings to different engines (rollout.spread_siblings)
        routing: make engines return the experts of every token in requests for training
        replicas: number of replicas of attention in each engine
        seed: give every sample its own seed, derived from this one and the sample's name; samples then share no request
        context: maximum length of a sequence in an engine, in tokens
        vocabulary: size of the model's vocabulary; prompts with other tokens are refused
        names: names of the adapters, if every version is one in the engines; adapter_per is what keeps one
        agents, past_versions: adapters of roles, and the past versions that play some (Config.past_versions)
        vision: how the model reads images, if it does
        http: replaces aiohttp's session
        stop: texts that end an answer; samples then share no request, because each is aborted by itself
        sampling: further sampling parameters of every request, in a run that trains nothing
        headers, requests: make further headers and the names of requests (engine/inflight.py)
        """
        self._http = GenerateEndpoint(router, access, timeout, http)
        self._longest, self._context, self._stop_ids = max_new_tokens, context, stop_token_ids
        self._stop = stop
        self.inflight = InFlight(
            self._http,
            run,
            {
                **(sampling or {}),
                "stop_token_ids": stop_token_ids,
                "skip_special_tokens": False,
                **_without_placeholders(vision),
            },
            cache_key=cache_key,
            pause_mode=pause_mode,
            fields=dict(fields or {}),
            routing=routing is not None,
            replicas=replicas,
            names=names,
            past_versions=past_versions,
            headers=headers,
            requests=requests,
            stop=stop,
        )
        self.roles = RoleAdapters(agents, self.inflight, versions=names is not None, per=adapter_per)
        self._vocabulary = vocabulary
        self._routing = routing
        self._vision = vision
        self._coalesce, self.temperature, self._retry_timeout = (
            coalesce and seed is None and not stop,
            temperature,
            retry_timeout,
        )
        self._seed, self._spread = seed, SiblingSpread(spread)
        self._serial = itertools.count()
        self._waiting: dict[tuple, list[_Asking]] = {}
        self._tasks: dict[asyncio.Task[None], list[_Asking]] = {}

    def generate(
        self,
        temperature: float | None = None,
        *,
        group: str = "",
        purpose: Purpose = "training",
        sample: str = "",
        adapter: int | None = None,
        born: int | None = None,
    ) -> GenerationSession:
        """Return a session for one episode. A temperature of 0 is greedy.

        Siblings have the same `group`, which was admitted at version `born` (unset: the newest); `sample` names each of
        them. The caller holds the version that it gives as `adapter` (engine/adapters.py).
        """
        seed = None
        if self._seed is not None:
            seed = seed_of(f"{self._seed} {purpose} {sample}")
        temperature = self.temperature if temperature is None else temperature
        born = self.inflight.version if born is None else born
        session = GenerationSession(self, group, temperature, purpose, seed, sample=sample, born=born)
        session.adapter = adapter
        return session

    def resume(
        self, group: str, sample: str, born: int, received: int, said: list[SavedCompletion]
    ) -> GenerationSession:
        """Restore the session of an episode of a saved run.

        With seeds, the saved completions are dropped and generated again from their start, because the last bits of an
        engine's numbers depend on whether it prefills a token or generates it.
        """
        session = self.generate(group=group, sample=sample, born=born)
        session.received, session.recalled = received, [] if self._seed is not None else list(said)
        return session

    async def close(self) -> None:
        """Cancel the requests that are still open, and close the connections."""
        open_requests = list(self._tasks)
        for task in open_requests:
            task.cancel()
        await asyncio.gather(*open_requests, return_exceptions=True)
        await self._http.close()
        if self._vision:
            self._vision.decoder.close()

    # -- requests of siblings ------------------------------------------------------------------------------

    def submit(
        self,
        session: GenerationSession,
        token_ids: list[int],
        most: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
    ) -> asyncio.Future[Completion]:
        """Submit a request and return the future of its completion. Raises PromptRefused for a token that the model
        does not have, and ImageRefused if there is not an image for each placeholder.

        Siblings that submit the same prompt in the same iteration of the event loop share one request.
        """
        loop = asyncio.get_running_loop()
        self._check_tokens(token_ids)
        added = self._added(token_ids, images)
        limit = self._limit(len(token_ids) + added, most)
        if not session.routing_key:
            alone = session.sample and self._spread(len(token_ids) + added)
            session.routing_key = session.sample if alone else session.group
        exchange = session.asks(token_ids, limit, role, images, added)
        if (recalled := session.recall(exchange)) is not None:
            return self._go_on(session, exchange, recalled)
        future: asyncio.Future[Completion] = loop.create_future()
        if limit < 1:
            exchange.completion = Completion([], [], [], "length")
            future.set_result(exchange.completion)
            return future
        key: tuple = (next(self._serial),)
        if self._coalesce and session.temperature > 0 and session.routing_key == session.group:
            served_by = exchange.name, exchange.adapter, exchange.purpose
            key = (session.group, session.temperature, limit, served_by, tuple(token_ids), *images)
        self.inflight.adapters.acquire(exchange.holds)
        if key in self._waiting:
            self._waiting[key].append((session, exchange, future))
        else:
            self._waiting[key] = [(session, exchange, future)]
            loop.call_soon(self._start, key, token_ids)
        return future

    def _check_tokens(self, token_ids: list[int]) -> None:
        """Raise PromptRefused for a token that is not in the vocabulary: SGLang's embedding would raise IndexError,
        which ends the engine, and then the next one that gets the request."""
        if self._vocabulary is None or not token_ids:
            return
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._vocabulary:
                raise PromptRefused(
                    f"the prompt has token {token}, but the model's vocabulary has {self._vocabulary} tokens: use ids "
                    f"from 0 to {self._vocabulary - 1}"
                )

    def _added(self, token_ids: list[int], images: Sequence[bytes]) -> int:
        """Return the number of tokens that images take beyond their placeholders. Raises ValueError if they do not fit
        together."""
        if self._vision is not None:
            return self._vision.tokens.added(token_ids, images)
        if images:
            raise ValueError(f"the request has {len(images)} images, but the model of this run reads none")
        return 0

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the images of messages in order, as the model reads them. Raises ImageRefused."""
        found = images_in(messages)
        if found and self._vision is None:
            raise ImageRefused("the model of this run reads no images: choose one that does, or send text")
        begun = [self._vision.decoder.begin(one) for one in found] if self._vision else []
        return [await asyncio.wrap_future(one) for one in begun]

    def narrow(self, context: int) -> None:
        """Lower the maximum length of a sequence to the KV cache of an engine, in tokens."""
        self._context = min(self._context or context, context)

    def _limit(self, asked: int, most: int | None) -> int:
        """Return the maximum length of an answer to a prompt of `asked` tokens; 0 or less means no room."""
        limit = self._longest if most is None else min(most, self._longest)
        if self._context is None:
            return limit
        return min(limit, self._context - 2 - asked) if asked <= self._context - RESERVED else 0

    def _start(self, key: tuple, token_ids: list[int]) -> None:
        asking = self._waiting.pop(key)
        self._watch(self._answer(asking, token_ids), asking)

    def _watch(self, answering: Coroutine[Any, Any, None], asking: list[_Asking]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks[task] = asking  # the event loop keeps only a weak reference
        task.add_done_callback(self._settle)
        futures = [future for _, _, future in asking]
        for future in futures:  # cancel the request when nobody waits for it any more
            future.add_done_callback(lambda _: task.cancel() if _left_alone(futures) else None)

    def _go_on(
        self, session: GenerationSession, exchange: Exchange, recalled: Completion
    ) -> asyncio.Future[Completion]:
        """Return the future of a recalled completion. It is continued from its last token if it is incomplete."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        token_ids = exchange.context
        if recalled.finish_reason:
            exchange.completion = recalled
            session.routed = [*token_ids, *recalled.token_ids] if recalled.routing else []
            future.set_result(recalled)
            return future
        exchange.parts.append(PartialCompletion.recalled(recalled, known_rows(session.routed, token_ids)))
        self.inflight.adapters.acquire(exchange.holds)
        self._watch(self._finish(session, exchange, future), [(session, exchange, future)])
        return future

    async def _answer(self, asking: list[_Asking], token_ids: list[int]) -> None:
        """Send one request with a sample for each sibling. A sibling proceeds as soon as its own sample is complete."""
        known = min(known_rows(session.routed, token_ids) for session, _, _ in asking)
        if len(asking) == 1:
            ((session, exchange, future),) = asking
            await self.inflight.stream([PendingSample(session, exchange)], token_ids, begun=0, routed_from=known)
            await self._finish(session, exchange, future)
            return
        async with asyncio.TaskGroup() as answers:

            def pending(
                session: GenerationSession, exchange: Exchange, future: asyncio.Future[Completion]
            ) -> PendingSample:
                return PendingSample(
                    session, exchange, lambda: answers.create_task(self._finish(session, exchange, future))
                )

            await self.inflight.stream([pending(*one) for one in asking], token_ids, begun=0, routed_from=known)

    async def _finish(self, session: GenerationSession, exchange: Exchange, future: asyncio.Future[Completion]) -> None:
        completion = await self._whole(session, exchange)
        if not future.done():  # the sibling may have been cancelled
            future.set_result(completion)

    def _settle(self, task: asyncio.Task[None]) -> None:
        """End the use of a request's adapter, and pass its error to each sibling that has no answer yet.

        An EngineError stays an EngineError. Any other error counts as a bug of asyncrl, not as the agent's failure.
        """
        asking = self._tasks.pop(task)
        for _, exchange, _ in asking:
            self.inflight.adapters.release(exchange.holds)
        if task.cancelled() or (error := task.exception()) is None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        for _, _, future in asking:
            if not future.done():
                refused = isinstance(error, EngineError)
                failure = (
                    EngineError(f"generation failed: {error}")
                    if refused
                    else AsyncRLError(f"a bug in asyncrl: {error!r}")
                )
                failure.__cause__ = error
                future.set_exception(failure)

    def closed(self, session: GenerationSession) -> None:
        """End a session's use of its adapters. No-op without adapters."""
        if not self.roles.versions:
            return
        self.roles.release(session)
        for asking in list(self._tasks.values()):
            for asker, _, future in asking:
                if asker is session:
                    future.cancel()

    # -- an answer and its continuations -------------------------------------------------------------------

    async def _whole(self, session: GenerationSession, exchange: Exchange) -> Completion:
        """Return the complete answer, after requesting continuations until nothing is missing."""
        token_ids, parts, patience = exchange.context, exchange.parts, _Patience(self._retry_timeout)
        routed = ExpertRoutingAssembler(self._routing if exchange.purpose == "training" else None, parts[0])
        while reason := parts[-1].cut:
            begun = [token for part in parts for token in part.token_ids]
            inferred = parts[-1].broken and exchange.adapter is None
            self.inflight.figures.inferred_tokens += len(parts[-1].token_ids) if inferred else 0
            if ended := self._ended(begun, exchange.limit):  # it was complete, but its last chunk was lost
                parts[-1].end_with(ended)
                break
            with session.activity.spent(RETRY, reason):
                await patience.before_retry(reason, progressed=bool(parts[-1].token_ids))
            self.inflight.figures.continued["aborted" if reason == "aborted" else "broken"] += 1
            sequence = [*token_ids, *begun]
            await self.inflight.stream(
                [PendingSample(session, exchange)], sequence, begun=len(begun), routed_from=routed.end
            )
            if last := parts[-1].last:
                self.inflight.figures.refilled_tokens += last.prompt_tokens - last.cached_tokens
            routed.add(parts[-1])
        completion = routed.into(joined(parts), len(token_ids), parts[-1])
        self._spread.finished(len(completion.token_ids))
        session.routed = [*token_ids, *completion.token_ids] if completion.routing else []
        exchange.completion, exchange.parts = completion, []
        return completion

    def _ended(self, token_ids: list[int], limit: int) -> str | None:
        """Return the finish reason of an answer of these tokens, or None when it is not complete."""
        if (token_ids and token_ids[-1] in self._stop_ids) or self._stop.end(token_ids, len(token_ids)):
            return "stop"
        return "length" if len(token_ids) >= limit else None


_Asking = tuple[GenerationSession, Exchange, asyncio.Future[Completion]]


def _left_alone(futures: list[asyncio.Future[Completion]]) -> bool:
    """Return whether no future is pending and at least one was cancelled."""
    return all(future.done() for future in futures) and any(future.cancelled() for future in futures)


def _without_placeholders(vision: Vision | None) -> dict[str, Any]:
    """Return the sampling parameters that keep an answer free of placeholders. Without them, an answer with one would
    be a prompt with more placeholders than images in the next turn."""
    return {"logit_bias": {str(token): FORBIDDEN for token in vision.tokens.forbidden}} if vision else {}


class _Patience:
    """Retry policy of one answer: exponential backoff until no token has arrived for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fruitless = 0
        self._since: float | None = None  # time of the first retry since a token arrived

    async def before_retry(self, reason: str, *, progressed: bool) -> None:
        """Wait before the next attempt. Raises EngineError with the reason when no token has arrived for too long."""
        now = asyncio.get_running_loop().time()
        if progressed or self._since is None:
            self._fruitless, self._since = 0, now
        elif now - self._since > self._seconds:
            raise EngineError(
                f"no token arrived for {now - self._since:.0f} s in {self._fruitless + 1} attempts; the last one "
                f"failed: {reason}"
            )
        self._fruitless += 1
        if self._fruitless > 1:
            await pause(self._fruitless - 2)
