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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.engine.served import ServedWeights
from asyncrl.engine.session import PartialAnswer, Request, seed_of
from asyncrl.engine.stream import GenerateEndpoint, Headers, StreamBroken
from asyncrl.errors import EngineError
from asyncrl.images import data_url
from asyncrl.observability.intervals import PUBLISH, QUEUED
from asyncrl.schema import POLICY

if TYPE_CHECKING:
    from asyncrl.engine.client import ClientSettings

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


@dataclass(eq=False)
class _Sent:
    """One request to an engine in flight, for the samples of one or more requests."""

    scope: asyncio.Timeout
    tokens: int  # in its prompt, and received so far
    rid: str  # its name in the engine
    answered: bool = False
    overtaken: bool = False  # a publish began before its first chunk arrived
    engine: str = ""  # URL, once the router has chosen one and that has taken the request

    def routed(self, engine: str) -> None:
        """Record which engine has taken the request."""
        self.engine = engine


class InFlight:
    """Sends requests and tracks those that are open."""

    def __init__(
        self, http: GenerateEndpoint, settings: ClientSettings, headers: Headers, served: ServedWeights
    ) -> None:
        """`headers` makes further headers of a request."""
        self._http = http
        self._settings = settings
        self._headers = headers
        self._sampling = settings.sampling
        self.served = served
        self._serial = itertools.count()
        self._sent: dict[_Sent, None] = {}  # in the order in which they were sent
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
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
        for sent in self._sent:
            sent.overtaken = not sent.answered
        self._retracted = sum(sent.tokens for sent in self._sent) if self._settings.pause_mode == "retract" else 0

    def release(self, version: int) -> None:
        """Send requests again, under the prefix-cache key of `version`, which every engine now serves.

        When the caches are not flushed, a request that was in transit or in an engine's queue during the pause may run
        under the new weights and find its prompt in the cache of the old ones. Such a request is sent again, unless an
        earlier publish has already ended it.
        """
        self.version = version
        self.held = 0.0
        self._changed[version] = time.time()
        self._changed.pop(version - KNOWN_PUBLISHES, None)
        self.figures.refilled_tokens += self._retracted
        self._needed += self._retracted
        self._open.set()
        if self._settings.pause_mode == "in_place" and self._settings.cache_key == "version":
            for sent in self._sent:
                if sent.overtaken and not sent.scope.expired():
                    sent.scope.reschedule(0.0)

    def restore(self, version: int, tokens: Mapping[str, int], late: int) -> None:
        """Restore the saved version and token counts. Requests wait until every engine serves that version."""
        self.version = version
        self.tokens = Counter(tokens)
        self.late_tokens = late
        self.hold()

    @property
    def holding(self) -> bool:
        """True while new requests are held back because the weights change."""
        return not self._open.is_set()

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
        self, requests: Sequence[Request], hand_over: Callable[[Request], object] = lambda request: None
    ) -> None:
        """Stream the next part of the answer to each of these requests, in one request to an engine with a sample for
        each. Send it again for those without an answer if a publish overtakes it. `hand_over` is called as soon as a
        sample has ended: siblings do not wait for the longest."""
        waiting = list(requests)
        while waiting:
            if self.holding:
                with ExitStack() as held:
                    for request in waiting:
                        held.enter_context(request.session.activity.spent(QUEUED, PUBLISH))
                    await self._open.wait()
            body = self._body(waiting)
            self._needed += _needed(waiting, body)
            answers = [request.begin(self.version) for request in waiting]
            sent = _Sent(asyncio.timeout(None), len(body["input_ids"]) + waiting[0].added, body["rid"])
            self._opened(sent)
            try:
                async with sent.scope:
                    await self._read(sent, answers, body, hand_over)
            except TimeoutError:
                if not sent.scope.expired():
                    raise
                self.figures.continued["overtaken"] += 1
            finally:
                self._closed(sent)
                for answer in answers:
                    outcome = "overtaken" if sent.scope.expired() else "cut off"
                    answer.close(outcome, self._changed, answered=False)
            waiting = [answer.request for answer in answers if not answer.answered]

    async def _read(
        self,
        sent: _Sent,
        answers: Sequence[PartialAnswer],
        body: dict[str, Any],
        hand_over: Callable[[Request], object],
    ) -> None:
        session = answers[0].request.session
        why = "the stream ended before its last chunk"
        try:
            headers = self._headers(session.group, session.sample, session.activity.requests)
            async for chunk in self._http.stream(body, session.routing_key or sent.rid, headers, sent.routed):
                if not 0 <= chunk.index < len(answers):
                    raise EngineError(
                        f"the engine returned sample {chunk.index} for a request of {len(answers)} samples"
                    )
                answer = answers[chunk.index]
                new = answer.add(chunk)
                self._count(answer, new)
                sent.answered = True
                sent.tokens += new
                if answer.stops(new) and not answer.last and sent.engine:
                    await self._http.abort(sent.engine, sent.rid)
                if answer.last:
                    self._end(answer, body)
                    hand_over(answer.request)
        except StreamBroken as broken:
            why = str(broken)
        self.figures.requests += 1
        for answer in answers:
            if not answer.answered:
                answer.stop_at(why)
                self._end(answer, body)
                hand_over(answer.request)

    def _end(self, answer: PartialAnswer, body: dict[str, Any]) -> None:
        """End one sample, complete or not. The others may go on for much longer."""
        request = answer.request
        read = len(body["input_ids"]) + request.added
        request.session.cached = (body["extra_key"], read + len(answer.token_ids))
        if answer.last:
            self.figures.prompt_tokens += answer.last.prompt_tokens
            self.figures.cached_tokens += answer.last.cached_tokens
        answer.close(answer.cut or "", self._changed, answered=True)
        request.live = None
        request.parts.append(answer)

    def _count(self, answer: PartialAnswer, tokens: int) -> None:
        session, purpose = answer.request.session, answer.request.purpose
        self.tokens[purpose] += tokens
        kept = 0 if purpose == "past" else tokens
        if session.closed:
            self.late_tokens += kept
        else:
            session.hear(kept)
        if tokens and answer.doing and not answer.doing.first:
            session.activity.heard(answer.doing)

    def _body(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the request to an engine. The samples differ in nothing but what an engine draws."""
        settings = self._settings
        first, session = requests[0], requests[0].session
        begun = first.token_ids
        key = f"v{self.version if first.pinned is None else first.pinned}"  # a pinned version always has its own cache
        if first.fields and first.model != POLICY:
            key = f"{first.model}-{key}"
        if settings.cache_key == "group":
            key = session.group if first.pinned is None else f"{session.group}-{key}"
        images: list[Any] = [data_url(png) for png in first.images]
        if images and len(requests) > 1:
            images = [images]  # SGLang takes several samples for a batch, in which each prompt has a list of its own
        rid = f"{settings.run}-{settings.requests}{next(self._serial):010d}"  # fixed width: engines abort by prefix
        body = dict(settings.fields)
        if settings.replicas > 1:
            body["routed_dp_rank"] = seed_of(session.routing_key or rid) % settings.replicas
        for hooks in settings.hooks:
            body |= hooks.asks(requests)
        body |= first.fields
        body["input_ids"] = [*first.context, *begun]
        if images:
            body["image_data"] = images
        sampling = self._sampling | {
            "max_new_tokens": first.limit - len(begun),
            "temperature": session.temperature,
            "n": len(requests),
        }
        if first.seed is not None:
            sampling["sampling_seed"] = first.seed
        return body | {
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "rid": rid,
            "extra_key": f"{settings.run}-{key}",  # prefix caches are never shared between runs
        }

    # -- open requests -------------------------------------------------------------------------------------

    def _opened(self, sent: _Sent) -> None:
        if not self._sent:
            self._busy_since = asyncio.get_running_loop().time()
        self._sent[sent] = None
        self._idle.clear()

    def _closed(self, sent: _Sent) -> None:
        del self._sent[sent]
        if not self._sent:
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
        if self._sent:
            now = asyncio.get_running_loop().time()
            self.figures.seconds_busy += now - self._busy_since
            self._busy_since = now
        taken, self.figures = self.figures, EngineStats()
        return taken


def _needed(requests: Sequence[Request], body: dict[str, Any]) -> int:
    """Return the number of tokens that an engine must prefill for a request, however large its cache is."""
    first, asked = requests[0], len(body["input_ids"])
    key, known = first.session.cached
    cached = known if key == body["extra_key"] and asked == len(first.context) else 0
    samples = len(requests) - 1  # each prefills the last token itself
    return asked + first.added - cached + samples
