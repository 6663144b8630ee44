"""The interface of one episode to the policy, its requests, and their answers: put together from the streaming chunks
of a sample, and from the continuations of an interrupted one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.engine.stop_strings import StopStrings
from asyncrl.engine.stream import PASSING, ChunkMeta, StreamChunk
from asyncrl.errors import EngineError
from asyncrl.images import image_name
from asyncrl.observability import intervals
from asyncrl.observability.intervals import PREFILL, Activity, Ongoing
from asyncrl.schema import POLICY, Completion, Exchange, Message, VersionSpan

if TYPE_CHECKING:
    from asyncrl.engine.client import GenerationClient

Purpose = Literal["training", "evaluation", "past"]
"""Purpose under which tokens are counted; past: tokens of roles that past versions play, in training."""


@dataclass(eq=False)
class GenerationSession:
    """Interface of one episode to the policy. All of its requests go to one engine, which caches its turns."""

    _client: GenerationClient
    group: str
    temperature: float
    purpose: Purpose
    seed: int | None = None
    sample: str = ""
    born: int = 0  # version at which its group was admitted
    pinned: int | None = None  # version that answers all requests; None: the newest, for each completion
    routing_key: str = ""  # of its requests: its own, or its group's
    received: int = 0  # tokens that engines sent for this session, kept or not
    closed: bool = False
    cached: tuple[str, int] = ("", 0)  # prefix-cache key, and how many tokens engines may hold under it
    requests: list[Request] = field(default_factory=list)
    recalled: list[Exchange] = field(default_factory=list)
    """Completions from the saved state of a resumed run, for requests that the agent makes again."""
    activity: Activity = field(default_factory=Activity)

    @property
    def trained_at(self) -> float:
        """Temperature of training samples."""
        return self._client.temperature

    async def __call__(
        self,
        token_ids: list[int],
        max_new_tokens: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
        stop: Sequence[str] = (),
    ) -> Completion:
        """Continue exactly these tokens, with an image for each placeholder, by at most `max_new_tokens` and up to one
        of the texts `stop`, in a role.

        The completion is empty when the context has no room. Raises EngineError when the fleet cannot answer, and
        ConfigError for a role that nothing plays.
        """
        return await self._client.submit(self, token_ids, max_new_tokens, role, images, stop)

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the images of messages in order, as the model reads them. Raises ImageRefused."""
        return await self._client.images(messages)

    def trains(self, role: str) -> bool:
        """Return whether the turns of a role are trained."""
        return self._client.inflight.served.trains(role)

    @property
    def next_seed(self) -> int | None:
        """Seed of the next request. Each has its own, so an agent that makes the same request twice gets two different
        answers."""
        number = len(self.requests)
        return seed_of(f"{self.seed} {number}") if self.seed is not None and number else self.seed

    def hear(self, tokens: int) -> None:
        """Count the tokens of a chunk that arrived."""
        self.received += tokens
        self.activity.since = time.monotonic()

    def said(self) -> list[Exchange]:
        """Return every request and its completion so far, for the saved state of the run.

        This includes recalled completions that the agent has not requested yet.
        """
        said = [Exchange(one.context, one.so_far(), one.role, one.image_names) for one in self.requests]
        return [*(one for one in said if one.completion.token_ids), *self.recalled]

    def recall(self, request: Request) -> Completion | None:
        """Remove and return the completion that this request got before the run was resumed, or return None. With a
        pinned version, a partial completion of another one is dropped: only its own could continue it."""
        asked = request.context, request.role, request.image_names
        for one in self.recalled:
            if (one.context, one.role, one.images) == asked:
                self.recalled.remove(one)
                usable = one.completion.finish_reason or request.pinned in (None, one.version)
                return one.completion if usable else None
        return None

    def restore(self, received: int, said: Sequence[Exchange]) -> None:
        """Continue an episode of a saved run, which has received so many tokens. With seeds, completions are generated
        again from their start: an engine's last bits depend on whether it prefills a token or generates it."""
        self.received = received
        self.recalled = list(said) if self.seed is None else []

    def forget(self) -> None:
        """Drop the requests so far because the episode starts over. Their tokens still count as received."""
        self.requests = []

    def close(self) -> int:
        """Close the session at the end of its episode and return the number of tokens received.

        Tokens that arrive afterwards are counted as late tokens, not as tokens of this session. With pinned versions,
        requests that the agent left in flight end: their versions could not be unloaded.
        """
        self.closed = True
        self.activity.finish()
        self._client.closed(self)
        return self.received


@dataclass(eq=False)
class Request:
    """One request of an episode, and what has come of its answer. It may take several requests to engines."""

    session: GenerationSession
    context: list[int]
    limit: int  # tokens
    seed: int | None = None
    role: str = ""
    purpose: Purpose = "training"
    images: Sequence[bytes] = ()  # in the order of their placeholders in the context
    added: int = 0  # tokens that the images take beyond their placeholders
    stop: StopStrings = field(default_factory=StopStrings)  # texts that end its answer
    model: str = POLICY  # what answers it, of several that are trained
    pinned: int | None = None  # version that answers it from its first to its last token; None: those of the engines
    fields: dict[str, Any] = field(default_factory=dict)  # further ones of the request to an engine, which name both
    holds: int | None = None  # version that must stay in the engines until it has ended
    parts: list[PartialAnswer] = field(default_factory=list)  # ended parts, complete or interrupted
    live: PartialAnswer | None = None  # the part that is streaming now
    future: asyncio.Future[Completion] | None = None  # what the agent waits for
    completion: Completion | None = None  # set once the answer is complete

    @property
    def image_names(self) -> list[str]:
        """Names of the images in the context."""
        return [image_name(png) for png in self.images]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer in the parts that have ended."""
        return [token for part in self.parts for token in part.token_ids]

    def begin(self, version: int) -> PartialAnswer:
        """Begin the next part, for which a request is sent now, while every engine serves `version`."""
        activity = self.session.activity
        activity.requests += 1
        asked_at = version if self.pinned is None else self.pinned
        self.live = PartialAnswer(self, asked_at, doing=activity.begin(PREFILL, self.role))
        return self.live

    def complete(self, completion: Completion) -> None:
        """Give the agent its completion, unless it has been cancelled."""
        self.completion = completion
        self.parts = []
        if self.future and not self.future.done():
            self.future.set_result(completion)

    def so_far(self) -> Completion:
        """Return the completion, or the partial one with an empty finish reason.

        The versions of a part that is still streaming are inferred.
        """
        if self.completion:
            return self.completion
        parts = list(self.parts)
        if self.live:
            under_way = replace(self.live, token_ids=list(self.live.token_ids), logprobs=list(self.live.logprobs))
            under_way.stop_at("it is under way")
            parts.append(under_way)
        return joined(parts, "")


@dataclass(eq=False)
class PartialAnswer:
    """The part of an answer that one request to an engine returned. Every engine served version `asked_at` when it was
    sent. It is apart from the request that it answers, because that may be continued by another one while the samples
    of its siblings are still awaited."""

    request: Request
    asked_at: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: ChunkMeta | None = None
    broken: str | None = None
    """Reason why the stream ended before its last chunk. The versions come with that chunk, so they are inferred."""
    doing: Ongoing | None = None  # its interval in the timeline, until it has ended
    answered: bool = False  # whether it has ended, complete or not, rather than been overtaken by a publish
    ended: str | None = None
    """Finish reason of an answer that is complete without the engine's word for it: it was when it was interrupted,
    although its last chunk did not arrive, or it has a stop string."""
    _spans: list[VersionSpan] | None = None
    received: int = 0  # tokens that arrived, including those after a stop string

    def add(self, piece: StreamChunk) -> int:
        """Add the next chunk and return the number of new tokens in it.

        The chunk of an aborted request that was waiting in the queue repeats tokens that were already sent.
        """
        meta = piece.meta_info
        token_ids, entries = piece.output_ids, meta.output_token_logprobs or []
        if meta.finish_reason and meta.finish_reason.type == "abort":
            new = max(0, meta.completion_tokens - self.received)
            entries = entries[len(entries) - new :]
            token_ids = [token for _, token, _ in entries]
        self.received += len(token_ids)
        if not self.ended:
            self.token_ids += token_ids
            self.logprobs += [logprob for logprob, _, _ in entries if logprob is not None]
        if meta.finish_reason:
            self.last = meta
            if not all(span.version.isdigit() for span in meta.weight_versions or []):
                # somebody restarted the engine, and the weights that generated the tokens are unknown
                self.token_ids = []
                self.logprobs = []
                self.last = None
                self.ended = None
                self.broken = "the engine has no weights of this run"
        return len(token_ids)

    @classmethod
    def recalled(cls, request: Request, completion: Completion) -> PartialAnswer:
        """Restore the part of an answer from the saved state of a run."""
        return cls(
            request,
            0,
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs),
            broken="the run was resumed",
            _spans=completion.versions,
        )

    def stop_at(self, reason: str) -> None:
        """Mark the stream as broken, unless its last chunk has arrived.

        Drop tokens without log-probabilities, and log-probabilities without tokens.
        """
        if self.last is None:
            self.broken = self.broken or reason
            whole = min(len(self.token_ids), len(self.logprobs))
            del self.token_ids[whole:], self.logprobs[whole:]

    @property
    def cut(self) -> str | None:
        """Reason why the answer must be continued, or None when it is complete or was refused.

        Either the stream broke, a weight update or the loss of the engine aborted it, or the engine was overloaded.
        """
        if self.ended:
            return None
        if self.broken is not None:
            return self.broken
        reason = self.last.finish_reason if self.last else None
        if reason is None or reason.type != "abort":
            return None
        if reason.status_code is None:
            return "aborted"
        return f"{reason.status_code} {reason.message}" if reason.status_code in PASSING else None

    def stops(self, new: int) -> bool:
        """End the answer at a stop string whose last token is among the `new` ones, and return whether it has one. The
        text may have begun before the answer was interrupted. Whatever else the engine sends before it has aborted the
        request is dropped, but the last chunk is still awaited, because it tells the versions of the tokens."""
        stop = self.request.stop
        if self.ended or not stop.texts:
            return False
        before = self.request.token_ids
        end = stop.end([*before, *self.token_ids], new)
        if end is None:
            return False
        del self.token_ids[end - len(before) :], self.logprobs[end - len(before) :]
        self.ended = "stop"
        return True

    def close(self, outcome: str, changed: Mapping[int, float], *, answered: bool) -> None:
        """Record in the timeline that it has ended, unless that is recorded. `changed` says when the engines got each
        version."""
        if self.doing is None:
            return
        spans = [(span.version, span.end - span.start) for span in self.spans()] if answered else []
        queued = (self.last.queue_time if answered and self.last else None) or 0.0
        ended = intervals.request(self.doing, time.time(), spans or [(-1, 1)], changed, queued=queued, outcome=outcome)
        self.request.session.activity.close(self.doing, ended)
        self.doing = None
        self.answered = answered

    @property
    def finish_reason(self) -> str:
        """Finish reason, "stop" or "length". Raises EngineError for any other end."""
        if self.ended:
            return self.ended
        reason = self.last.finish_reason if self.last else None
        if reason is None or reason.type not in ("stop", "length"):
            end = f"{reason.type!r} ({reason.message})" if reason else self.broken
            raise EngineError(f"the engine ended a request with {end}")
        return reason.type

    def spans(self) -> list[VersionSpan]:
        """Return the weight versions that generated the tokens. Raises EngineError when the engine reports none.

        A pinned version is the only one. Otherwise the spans come with the last chunk, and the tokens of a broken
        stream get the oldest version that they can have: the one that every engine served when the request was sent.
        """
        if self._spans is not None:
            return self._spans
        if not self.token_ids:
            return []
        if self.request.pinned is not None:
            return [VersionSpan(self.asked_at, 0, len(self.token_ids))]
        if self.broken is not None:
            return [VersionSpan(self.asked_at, 0, len(self.token_ids), inferred=True)]
        reported = self.last.weight_versions if self.last else None
        if reported is None:
            raise EngineError("the engine reports no weight_versions: SGLang 0.5.21 or newer is needed")
        own = len(self.token_ids) if self.ended else max((span.end for span in reported), default=0)
        return [VersionSpan(int(one.version), one.start, min(one.end, own)) for one in reported if one.start < own]


def joined(parts: list[PartialAnswer], reason: str) -> Completion:
    """Join an answer and its continuations into one completion. Raises EngineError when they do not fit together."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    try:
        for part in parts:
            for span in part.spans():
                start, end = span.start + len(token_ids), span.end + len(token_ids)
                before = spans[-1] if spans else None
                if before and (before.version, before.end, before.inferred) == (span.version, start, span.inferred):
                    start = spans.pop().start
                spans.append(VersionSpan(span.version, start, end, span.inferred))
            token_ids += part.token_ids
            logprobs += part.logprobs
        return Completion(token_ids, logprobs, spans, reason)
    except ValueError as error:
        raise EngineError(f"the engine's answer is inconsistent: {error}") from None


def seed_of(name: str) -> int:
    """Return the seed of a sample or of a request with this name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
