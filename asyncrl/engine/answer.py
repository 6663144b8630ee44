"""What an engine streams for one sample, put together; and the continuations of what was cut short."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from asyncrl.errors import EngineError
from asyncrl.types import Completion, VersionSpan


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None  # set when the engine refused the request


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_versions: list[_Span] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    routed_experts: bytes | None = None  # base64 on the wire; only the last piece tells them


class Piece(msgspec.Struct):
    """One server-sent event of /generate."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: int = 0
    error: dict | None = None


decode_piece = msgspec.json.Decoder(Piece).decode


@dataclass
class Answer:
    """A completion in the making, asked for when every engine served `asked_at`."""

    asked_at: int
    routed_from: int = 0  # position of the first token whose experts it was asked for
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: _Meta | None = None
    broken: str | None = None
    """Why its stream ended before its last piece, which tells the versions: they are inferred then."""
    _ended: str | None = None
    _spans: list[VersionSpan] | None = None

    def add(self, piece: Piece) -> int:
        """The next piece; returns how many tokens it brought. That of an aborted request which waited tells again what
        it had sent."""
        meta = piece.meta_info
        token_ids, entries = piece.output_ids, meta.output_token_logprobs or []
        if meta.finish_reason and meta.finish_reason.type == "abort":
            new = max(0, meta.completion_tokens - len(self.token_ids))
            entries = entries[len(entries) - new :]
            token_ids = [token for _, token, _ in entries]
        self.token_ids += token_ids
        self.logprobs += [logprob for logprob, _, _ in entries if logprob is not None]
        if meta.finish_reason:
            self.last = meta
            if not all(span.version.isdigit() for span in meta.weight_versions or []):
                self._disown()
        return len(token_ids)

    def _disown(self) -> None:
        """An engine that somebody else started again: nobody knows the weights that wrote it."""
        self.token_ids, self.logprobs, self.last = [], [], None
        self.broken = "its engine has no weights of this run"

    @classmethod
    def recalled(cls, completion: Completion, routed_from: int) -> Answer:
        """As far as it had come when the state of a run was saved."""
        asked_at = completion.versions[0].version if completion.versions else 0
        broken = "the run was resumed"
        return cls(
            asked_at,
            routed_from,
            list(completion.token_ids),
            list(completion.logprobs),
            broken=broken,
            _spans=completion.versions,
        )

    def stop_at(self, reason: str) -> None:
        """Its stream ended before its last piece came, unless it was whole."""
        if self.last is None:
            self.broken = self.broken or reason
            whole = min(len(self.token_ids), len(self.logprobs))
            del self.token_ids[whole:], self.logprobs[whole:]

    @property
    def cut(self) -> str | None:
        """Why it must be continued: its stream broke, an update of the weights or the loss of its engine aborted it, or
        the engine was overloaded. None when it is whole, or was refused."""
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
        """It was whole when it was cut."""
        self._ended = reason

    @property
    def ended_when_cut(self) -> bool:
        """It was whole, but its last piece did not say so."""
        return self._ended is not None

    @property
    def finish_reason(self) -> str:
        """ "stop" or "length". Raises EngineError when it ended otherwise."""
        if self._ended:
            return self._ended
        reason = self.last.finish_reason if self.last else None
        if reason is None or reason.type not in ("stop", "length"):
            told = f"{reason.type!r} ({reason.message})" if reason else self.broken
            raise EngineError(f"the engine ended a request with {told}")
        return reason.type

    def spans(self) -> list[VersionSpan]:
        """Which versions wrote it. Raises EngineError when the engine does not say.

        The spans come with the last piece: tokens of a broken stream take the oldest version that they can have, that
        which every engine served when they were asked for.
        """
        if self._spans is not None:
            return self._spans
        if not self.token_ids:
            return []
        if self.broken is not None:
            return [VersionSpan(self.asked_at, 0, len(self.token_ids), inferred=True)]
        told = self.last.weight_versions if self.last else None
        if told is None:
            raise EngineError("the engine reports no weight_versions: SGLang 0.5.19 or newer is needed")
        return [VersionSpan(int(span.version), span.start, span.end) for span in told]


PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP's answers to a request that may succeed later, or elsewhere; any other is the request's own fault."""


def joined(parts: list[Answer]) -> Completion:
    """One completion from an answer and its continuations. Raises EngineError when it is not whole."""
    return _joined(parts, parts[-1].finish_reason)


@dataclass(eq=False)
class Exchange:
    """What an episode asked, and what it was answered so far."""

    context: list[int]
    limit: int  # tokens
    seed: int | None = None
    parts: list[Answer] = field(default_factory=list)  # that have ended, whole or cut
    live: Answer | None = None  # whose pieces come now
    completion: Completion | None = None  # once it is whole

    def so_far(self) -> Completion:
        """Whole, or without a finish reason. Of what is under way the versions are inferred."""
        if self.completion:
            return self.completion
        parts = list(self.parts)
        if self.live:
            under_way = replace(self.live, token_ids=list(self.live.token_ids), logprobs=list(self.live.logprobs))
            under_way.stop_at("it is under way")
            parts.append(under_way)
        return _joined(parts, "")


def _joined(parts: list[Answer], reason: str) -> Completion:
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
        raise EngineError(f"the engine's answer does not fit together: {error}") from None
