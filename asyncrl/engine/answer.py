"""What an engine streams for one sample, put together; and continuations of what an update cut short."""

from __future__ import annotations

from dataclasses import dataclass, field

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


class Piece(msgspec.Struct):
    """One server-sent event of /generate."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: int = 0
    error: dict | None = None


decode_piece = msgspec.json.Decoder(Piece).decode


@dataclass
class Answer:
    """A completion in the making."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: _Meta | None = None

    def add(self, piece: Piece) -> None:
        """The next piece. That of an aborted request which waited tells again what it had sent."""
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

    @property
    def aborted(self) -> bool:
        """Cut short by an update of the weights, or because its engine left the fleet; not refused."""
        reason = self.last.finish_reason if self.last else None
        return reason is not None and reason.type == "abort" and reason.status_code is None

    def finish(self, reason: str) -> None:
        """It was whole when it was aborted."""
        assert self.last is not None
        self.last.finish_reason = _FinishReason(reason)

    def spans(self) -> list[VersionSpan]:
        """Which versions wrote it. Raises EngineError when the engine does not say."""
        told = self.last.weight_versions if self.last else None
        if told is None and self.token_ids:
            raise EngineError("the engine reports no weight_versions: SGLang 0.5.19 or newer is needed")
        return [VersionSpan(int(span.version), span.start, span.end) for span in told or ()]


def joined(parts: list[Answer]) -> Completion:
    """One completion from an answer and its continuations. Raises EngineError when it is not whole."""
    reason = parts[-1].last.finish_reason if parts[-1].last else None
    if reason is None:
        raise EngineError(f"the stream ended after {len(parts[-1].token_ids)} tokens, without a finish reason")
    if reason.type not in ("stop", "length"):
        raise EngineError(f"the engine ended a request with {reason.type!r} ({reason.message})")
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    try:
        for part in parts:
            for span in part.spans():
                start, end = span.start + len(token_ids), span.end + len(token_ids)
                if spans and (spans[-1].version, spans[-1].end) == (span.version, start):
                    start = spans.pop().start
                spans.append(VersionSpan(span.version, start, end))
            token_ids += part.token_ids
            logprobs += part.logprobs
        return Completion(token_ids, logprobs, spans, reason.type)
    except ValueError as error:
        raise EngineError(f"the engine's answer does not fit together: {error}") from None
