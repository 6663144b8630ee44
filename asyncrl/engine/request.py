"""A request of an episode, and its answer: put together from the streaming chunks of a sample, and from the
continuations of an interrupted one.

Experts (algo.routing_replay=R3). SGLang (0.5.21: srt/state_capturer, srt/managers/scheduler_components) stores the
experts beside its KV cache. The last chunk of a sample contains those of the positions from routed_experts_start_len to
the last token that the engine read, which is every token except the last one that it generated. Each part requests only
what the earlier parts lack:

    prompt p p p, answer a a a a, cut after two
    first part    0 .. 4    p p p a        (none if its stream broke, or if it was still in the queue)
    second part   4 .. 6    a a            requested with routed_experts_start_len=4, for a prompt of 5 tokens

The experts of the tokens before a cut are those that read them when the next token was generated. The exception is a
request that an engine retracts (memory, or weights.pause_mode=retract): it is prefilled again, and the engine reports
the experts of that prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncrl.config.roles import POLICY
from asyncrl.engine.stream import PASSING, ChunkMeta, StreamChunk
from asyncrl.errors import EngineError
from asyncrl.images import image_name
from asyncrl.routing import RoutingShape, compact
from asyncrl.schema import Completion, Routing, VersionSpan

if TYPE_CHECKING:
    from asyncrl.engine.session import GenerationSession

Purpose = Literal["training", "evaluation", "past"]
"""Purpose under which tokens are counted; past: tokens of roles that past versions play, in training."""


class StopStrings:
    """Texts that end an answer (rollout.stop, and the request's own). Engines work without a tokenizer and cannot look
    for them, so the client does, in the tokens that have arrived."""

    def __init__(self, texts: Sequence[str] = (), decode: Callable[[Sequence[int]], str] = str) -> None:
        """`decode` returns the text of tokens, special tokens included."""
        self.texts = texts
        self._decode = decode
        self._most = max((len(text.encode()) for text in texts), default=0)  # tokens that a text may take

    def and_also(self, texts: Sequence[str]) -> StopStrings:
        """Return these texts with further ones."""
        return StopStrings([*self.texts, *texts], self._decode) if texts else self

    def end(self, token_ids: Sequence[int], new: int) -> int | None:
        """Return the number of tokens up to the end of the first of these texts; None if there is none. Only a text
        whose last token is among the last `new` ones is found."""
        if not self.texts or not new:
            return None
        seen = len(token_ids) - new
        start = max(0, seen - self._most)
        if not self._found(token_ids[start:]):
            return None
        return next(end for end in range(seen + 1, len(token_ids) + 1) if self._found(token_ids[start:end]))

    def _found(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(one in text for one in self.texts)


@dataclass
class PartialAnswer:
    """The part of an answer that one request returned. Every engine served version `asked_at` when it was sent."""

    asked_at: int
    routed_from: int = 0  # position of the first token whose experts were requested
    adapter: bool = False  # whether an adapter of version `asked_at` generates every token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: ChunkMeta | None = None
    broken: str | None = None
    """Reason why the stream ended before its last chunk. The versions come with that chunk, so they are inferred."""
    _ended: str | None = None
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
        if not self._ended:
            self.token_ids += token_ids
            self.logprobs += [logprob for logprob, _, _ in entries if logprob is not None]
        if meta.finish_reason:
            self.last = meta
            if not all(span.version.isdigit() for span in meta.weight_versions or []):
                self._disown()
        return len(token_ids)

    def _disown(self) -> None:
        """Discard the tokens of an engine whose version labels are not numbers.

        Somebody restarted the engine, and the weights that generated the tokens are unknown.
        """
        self.token_ids = []
        self.logprobs = []
        self.last = None
        self._ended = None
        self.broken = "the engine has no weights of this run"

    @classmethod
    def recalled(cls, completion: Completion, routed_from: int) -> PartialAnswer:
        """Restore the part of an answer from the saved state of a run."""
        asked_at = completion.versions[0].version if completion.versions else 0
        return cls(
            asked_at,
            routed_from,
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
        if self._ended:
            return None
        if self.broken is not None:
            return self.broken
        reason = self.last.finish_reason if self.last else None
        if reason is None or reason.type != "abort":
            return None
        if reason.status_code is None:
            return "aborted"
        return f"{reason.status_code} {reason.message}" if reason.status_code in PASSING else None

    def end_with(self, reason: str) -> None:
        """Mark an answer as complete, with this finish reason: an interrupted one, or one with a stop string."""
        self._ended = reason

    def stop_after(self, tokens: int) -> None:
        """End the answer after so many tokens, whatever else the engine sends before it has aborted the request. The
        last chunk is still awaited, because it tells the versions of the tokens."""
        del self.token_ids[tokens:], self.logprobs[tokens:]
        self.end_with("stop")

    @property
    def ended_early(self) -> bool:
        """True if the answer is complete without the engine's word for it: it was when it was interrupted, although its
        last chunk did not arrive, or it has a stop string."""
        return self._ended is not None

    @property
    def finish_reason(self) -> str:
        """Finish reason, "stop" or "length". Raises EngineError for any other end."""
        if self._ended:
            return self._ended
        reason = self.last.finish_reason if self.last else None
        if reason is None or reason.type not in ("stop", "length"):
            end = f"{reason.type!r} ({reason.message})" if reason else self.broken
            raise EngineError(f"the engine ended a request with {end}")
        return reason.type

    def spans(self) -> list[VersionSpan]:
        """Return the weight versions that generated the tokens. Raises EngineError when the engine reports none.

        An adapter has one version. Otherwise the spans come with the last chunk, and the tokens of a broken stream get
        the oldest version that they can have: the one that every engine served when the request was sent.
        """
        if self._spans is not None:
            return self._spans
        if not self.token_ids:
            return []
        if self.adapter:
            return [VersionSpan(self.asked_at, 0, len(self.token_ids))]
        if self.broken is not None:
            return [VersionSpan(self.asked_at, 0, len(self.token_ids), inferred=True)]
        reported = self.last.weight_versions if self.last else None
        if reported is None:
            raise EngineError("the engine reports no weight_versions: SGLang 0.5.19 or newer is needed")
        own = len(self.token_ids) if self._ended else max((span.end for span in reported), default=0)
        return [VersionSpan(int(one.version), one.start, min(one.end, own)) for one in reported if one.start < own]


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
    name: str = POLICY  # its adapter
    adapter: int | None = None  # version of its adapter, if versions are adapters
    lora: str | None = None  # name of that version in the engines; None is the base
    past: bool = False  # whether a past version plays the role
    stop: StopStrings = field(default_factory=StopStrings)  # texts that end its answer
    parts: list[PartialAnswer] = field(default_factory=list)  # ended parts, complete or interrupted
    live: PartialAnswer | None = None  # the part that is streaming now
    future: asyncio.Future[Completion] | None = None  # what the agent waits for
    completion: Completion | None = None  # set once the answer is complete

    @property
    def holds(self) -> int | None:
        """Version whose adapters must stay until the request has ended. Past versions stay of themselves
        (Config.past_versions)."""
        return None if self.past else self.adapter

    @property
    def known(self) -> int:
        """Number of tokens of the context whose experts are known from an earlier turn: all but the last of those that
        were routed, if it begins with them."""
        routed = self.session.routed
        return max(0, len(routed) - 1) if self.context[: len(routed)] == routed else 0

    @property
    def image_names(self) -> list[str]:
        """Names of the images in the context."""
        return [image_name(png) for png in self.images]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer in the parts that have ended."""
        return [token for part in self.parts for token in part.token_ids]

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


def add_experts(known: Routing | None, part: PartialAnswer, shape: RoutingShape | None) -> Routing | None:
    """Return the experts that are known of an answer with those of its next part; None without a shape. Raises
    EngineError when they do not fit the model's shape."""
    if shape is None:
        return None
    known = known or Routing(part.routed_from, shape.width, b"")
    if part.last is None or part.last.routed_experts is None:
        return known
    try:
        rows = compact(part.last.routed_experts, shape)
    except ValueError as error:
        raise EngineError(f"the engine returned routed experts that do not fit the model: {error}") from None
    return Routing(known.start, shape.width, known.rows + rows[(known.end - part.routed_from) * shape.width :])


def with_experts(completion: Completion, known: Routing, prompt: int, last: PartialAnswer) -> Completion:
    """Return the completion of a prompt of `prompt` tokens with its experts.

    Raises EngineError when an engine finished the answer but reported too few rows. When the answer was interrupted
    after its last token, rows may be missing, and the trainer routes those tokens itself.
    """
    read = prompt + len(completion.token_ids) - 1
    if known.end < read and not last.ended_early:
        raise EngineError(
            f"the engine reported the experts of {known.end} of {read} tokens: was it started with "
            "--enable-return-routed-experts, and does its model report them?"
        )
    rows = known.rows[: (read - known.start) * known.width]
    return msgspec.structs.replace(completion, routing=Routing(known.start, known.width, rows))
