"""Tracking of requests in flight. Each request runs under one prefix-cache key, and none is sent while weights change.

tokens     every token is counted on arrival, whether or not its session keeps it; the token accounting compares the two
           counts
hold       new requests wait from before the engines pause until all engines serve the new version, so that no request
           runs under a prefix-cache key that is older than its weights
waits for  the next chunk (request_timeout); the end of a publish (the trainer's deadline)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.roles import POLICY
from asyncrl.engine.adapters import AdapterName, AdapterUse, PastVersions, no_past
from asyncrl.engine.partial_completion import Exchange, PartialCompletion, StopStrings
from asyncrl.engine.pending_sample import Listener, OpenRequest, PendingSample
from asyncrl.engine.session import seed_of
from asyncrl.engine.stream import GenerateEndpoint, Headers, StreamBroken, no_headers
from asyncrl.errors import EngineError
from asyncrl.images import data_url
from asyncrl.observability.intervals import PUBLISH, QUEUED

CacheKey = Literal["version", "group"]
KNOWN_PUBLISHES = 64
"""Number of versions whose publish is remembered, for answers that several versions generated."""
CAUSES = ("aborted", "broken", "overtaken")
"""Causes of a repeated request: an update or the loss of its engine aborted it, its stream broke, or a publish
overtook it."""


@dataclass
class EngineStats:
    """Engine statistics of the rollout side since the last call of `take_figures`."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds_busy: float = 0.0
    """Time with at least one request in flight."""
    continued: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CAUSES, 0)))
    """Number of answers that were requested again, by cause."""
    refilled_tokens: int = 0
    """Tokens prefilled again for these requests, or by the engine under pause_mode=retract."""
    inferred_tokens: int = 0
    """Tokens of broken streams, whose weight versions are inferred."""


class InFlight:
    """Sends requests and tracks those that are open."""

    def __init__(
        self,
        http: GenerateEndpoint,
        run: str,
        sampling: dict[str, Any],
        *,
        cache_key: CacheKey,
        pause_mode: str,
        fields: dict[str, Any],
        routing: bool = False,
        replicas: int = 1,
        names: AdapterName | None = None,
        past_versions: PastVersions = no_past,
        headers: Headers = no_headers,
        requests: str = "",
        stop: StopStrings,
    ) -> None:
        """Create the tracker. `requests` begins the names of its requests, which must differ from those of other
        processes of the run. With `routing`, training requests return the experts of every token that is read. Each
        engine has `replicas` of attention; requests with the same routing key use the same one. With `names`, every
        version is a set of adapters in the engines; `past_versions` are those that play roles. `headers`
        makes further headers of a request. `stop` are texts that end an answer; its request then has one sample."""
        self._http, self._run, self._sampling, self._fields = http, run, sampling, fields
        self._named = f"{run}-{requests}"
        self._stop = stop
        self._routing, self._names, self._headers, self._replicas = routing, names, headers, replicas
        self.adapters = AdapterUse(past_versions)
        self._cache_key, self._pause_mode = cache_key, pause_mode
        self._serial = itertools.count()
        self._requests: dict[OpenRequest, None] = {}  # in the order in which they were sent
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._busy_since = 0.0
        self.version = 0
        self.held = 0.0
        """Time since which requests are held back; 0 if they are not."""
        self._changed: dict[int, float] = {}
        self.figures = EngineStats()
        self.tokens: Counter[str] = Counter()
        """Tokens received so far, by purpose."""
        self.late_tokens = 0
        """Tokens that arrived for closed sessions; `tokens` counts them too."""
        self._needed = 0
        self._retracted = 0  # tokens in the engines at the beginning of a publish, which retracts them

    # -- a publish -----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold back new requests because the weights are about to change."""
        if not self.holding:
            self.held = time.time()
        self._open.clear()
        for sent in self._requests:
            sent.overtaken = not sent.answered
        self._retracted = sum(sent.tokens for sent in self._requests) if self._pause_mode == "retract" else 0

    def release(self, version: int) -> None:
        """Send requests again, under the prefix-cache key of `version`, which every engine now serves.

        When the caches are not flushed, a request that was in transit or in an engine's queue during the pause may run
        under the new weights and find its prompt in the cache of the old ones. Such a request is sent again, unless an
        earlier publish has already ended it.
        """
        self.version, self.held = version, 0.0
        self._changed[version] = time.time()
        self._changed.pop(version - KNOWN_PUBLISHES, None)
        self.figures.refilled_tokens += self._retracted
        self._needed += self._retracted
        self._open.set()
        if self._pause_mode == "in_place" and self._cache_key == "version":
            for sent in self._requests:
                if sent.overtaken and not sent.scope.expired():
                    sent.scope.reschedule(0.0)

    def restore(self, version: int, tokens: Mapping[str, int], late: int) -> None:
        """Restore the saved version and token counts. Requests wait until every engine serves that version."""
        self.version, self.tokens, self.late_tokens = version, Counter(tokens), late
        self.hold()

    @property
    def holding(self) -> bool:
        """True while new requests are held back because the weights change."""
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    async def confirmed(self, seconds: float | None = None) -> bool:
        """Return True: what this object is told is done at once. Other processes may have to confirm it."""
        return True

    async def gathered(self) -> None:
        """Return at once: the sessions are here. Those of other processes are brought up to date for a snapshot."""

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is in flight. Return False when that takes longer than `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # -- one request ---------------------------------------------------------------------------------------

    async def stream(
        self, samples: Sequence[PendingSample], token_ids: list[int], *, begun: int, routed_from: int = 0
    ) -> None:
        """Stream the samples of one request. Send it again for those without an answer if a publish overtakes it.

        begun: number of tokens at the end of `token_ids` that belong to the answer
        routed_from: position of the first token whose experts are not known
        """
        while waiting := [sample for sample in samples if not sample.answered]:
            sessions = [sample.session for sample in waiting]
            if self.holding:
                with ExitStack() as held:
                    for session in sessions:
                        held.enter_context(session.activity.spent(QUEUED, PUBLISH))
                    await self._open.wait()
            for sample in waiting:
                sample.begin()
            sent = OpenRequest(asyncio.timeout(None), len(token_ids) + waiting[0].exchange.added)
            self._opened(sent)
            try:
                request = self._request(waiting[0].exchange, sessions, token_ids, begun, routed_from)
                sent.rid = request["rid"]
                self._needed += _needed(sessions, request, begun) + waiting[0].exchange.added
                async with sent.scope:
                    await self._read(sent, waiting, request)
            except TimeoutError:
                if not sent.scope.expired():
                    raise
                self.figures.continued["overtaken"] += 1
            finally:
                self._closed(sent)
                for sample in waiting:
                    sample.end("overtaken" if sent.scope.expired() else "cut off", self._changed)

    async def _read(self, sent: OpenRequest, samples: Sequence[PendingSample], request: dict[str, Any]) -> None:
        routed_from = request.get("routed_experts_start_len", 0)
        adapter = samples[0].exchange.adapter
        asked_at = self.version if adapter is None else adapter
        answers = [PartialCompletion(asked_at, routed_from, adapter=adapter is not None) for _ in samples]
        for sample, answer in zip(samples, answers, strict=True):
            sample.exchange.live = answer
        why = "the stream ended before its last chunk"
        try:
            first = samples[0].session
            headers = self._headers(first.group, first.sample, first.activity.requests)
            key = first.routing_key or request["rid"]
            async for chunk in self._http.stream(request, key, headers, sent.routed):
                if not 0 <= chunk.index < len(answers):
                    raise EngineError(
                        f"the engine returned sample {chunk.index} for a request of {len(answers)} samples"
                    )
                sample, answer = samples[chunk.index], answers[chunk.index]
                new = answer.add(chunk)
                self._count(sample, new)
                if new and sample.doing and not sample.doing.first:
                    sample.session.activity.heard(sample.doing)
                sent.answered = True
                sent.tokens += new
                stopped = not answer.ended_early and self._stops(sample.exchange, answer, new)
                if stopped and not answer.last and sent.engine:
                    await self._http.abort(sent.engine, sent.rid)
                if answer.last:
                    self._end(sample, answer, request)
        except StreamBroken as broken:
            why = str(broken)
        self.figures.requests += 1
        for sample, answer in zip(samples, answers, strict=True):
            if not sample.answered:
                answer.stop_at(why)
                self._end(sample, answer, request)

    def _stops(self, exchange: Exchange, answer: PartialCompletion, new: int) -> bool:
        """End the answer at a stop string whose last token is among the `new` ones, and return whether it has one. The
        text may have begun before the answer was interrupted."""
        before = [token for part in exchange.parts for token in part.token_ids] if self._stop else []
        end = self._stop.end([*before, *answer.token_ids], new) if self._stop else None
        if end is not None:
            answer.stop_after(end - len(before))
        return end is not None

    def _end(self, sample: PendingSample, answer: PartialCompletion, request: dict[str, Any]) -> None:
        """End one sample, complete or not. The others may go on for much longer."""
        read = len(request["input_ids"]) + sample.exchange.added
        sample.session.cached = (request["extra_key"], read + len(answer.token_ids))
        if answer.last:
            self.figures.prompt_tokens += answer.last.prompt_tokens
            self.figures.cached_tokens += answer.last.cached_tokens
        sample.end(answer.cut or "", self._changed, answer)
        sample.answered = True
        sample.exchange.live = None
        sample.exchange.parts.append(answer)
        sample.hand_over()

    def _count(self, sample: PendingSample, tokens: int) -> None:
        session, purpose = sample.session, sample.exchange.purpose
        self.tokens[purpose] += tokens
        kept = 0 if purpose == "past" else tokens
        if session.closed:
            self.late_tokens += kept
        else:
            session.hear(kept)

    def _request(
        self, exchange: Exchange, sessions: Sequence[Listener], token_ids: list[int], begun: int, routed_from: int
    ) -> dict[str, Any]:
        adapter = exchange.adapter
        name = self._names(adapter, exchange.name) if self._names and adapter is not None else None
        key = f"v{self.version if adapter is None else adapter}"  # an adapter always has a cache of its own
        if name and exchange.name != POLICY:
            key = f"{exchange.name}-{key}"
        if self._cache_key == "group":
            key = sessions[0].group if adapter is None else f"{sessions[0].group}-{key}"
        routed = {"return_routed_experts": True, "routed_experts_start_len": routed_from}
        images: list[Any] = [data_url(png) for png in exchange.images]
        if images and len(sessions) > 1:
            images = [images]  # SGLang takes several samples for a batch, in which each prompt has a list of its own
        rid = f"{self._named}{next(self._serial):010d}"  # fixed width: engines abort by prefix
        at = {"routed_dp_rank": seed_of(sessions[0].routing_key or rid) % self._replicas} if self._replicas > 1 else {}
        return {
            **self._fields,
            **at,
            **(routed if self._routing and exchange.purpose == "training" else {}),
            **({"lora_path": name} if name else {}),
            "input_ids": token_ids,
            **({"image_data": images} if images else {}),
            "sampling_params": {
                **self._sampling,
                "max_new_tokens": exchange.limit - begun,
                "temperature": sessions[0].temperature,
                "n": len(sessions),
                **({} if exchange.seed is None else {"sampling_seed": exchange.seed}),
            },
            "return_logprob": True,
            "stream": True,
            "rid": rid,
            "extra_key": f"{self._run}-{key}",  # prefix caches are never shared between runs
        }

    # -- open requests -------------------------------------------------------------------------------------

    def _opened(self, sent: OpenRequest) -> None:
        if not self._requests:
            self._busy_since = asyncio.get_running_loop().time()
        self._requests[sent] = None
        self._idle.clear()

    def _closed(self, sent: OpenRequest) -> None:
        del self._requests[sent]
        if not self._requests:
            self.figures.seconds_busy += asyncio.get_running_loop().time() - self._busy_since
            self._idle.set()

    def take_needed(self) -> int:
        """Return the number of tokens since the last call that even a perfect cache would leave to prefill.

        Any prefill beyond that is waste.
        """
        needed, self._needed = self._needed, 0
        return needed

    def take_figures(self) -> EngineStats:
        """Return the statistics since the last call and reset them."""
        if self._requests:
            now = asyncio.get_running_loop().time()
            self.figures.seconds_busy += now - self._busy_since
            self._busy_since = now
        taken, self.figures = self.figures, EngineStats()
        return taken


def _needed(sessions: Sequence[Listener], request: dict[str, Any], begun: int) -> int:
    """Return the number of tokens that an engine must prefill for a request, however large its cache is."""
    key, known = sessions[0].cached
    found = known if key == request["extra_key"] and not begun else 0
    return len(request["input_ids"]) - found + len(sessions) - 1  # each sample prefills its last token itself
