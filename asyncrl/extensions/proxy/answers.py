"""Responses in the format of the OpenAI API, as one JSON object or as server-sent events.

A stream is sent only when the answer is complete, because `generate` returns complete answers, and what a client has
read cannot be taken back when an engine dies. In addition to OpenAI's fields, choices have a `turn` (for POST
/v1/reward), and `token_ids` when the request has return_token_ids (vLLM's name).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.extensions.proxy.fields import RequestOptions, Route
from asyncrl.schema import Completion, Message, Template


@dataclass(frozen=True)
class ResponseChoice:
    """One completion and its message."""

    turn: int
    completion: Completion
    message: Message
    stopped_at: str | None = None
    """The stop string of the request at which the message was cut."""
    malformed: Sequence[str] = ()
    """What is wrong with each tool call that stayed in the text."""

    @property
    def finish_reason(self) -> str:
        """Finish reason: stop, length or tool_calls."""
        if "tool_calls" in self.message:
            return "tool_calls"
        return "stop" if self.stopped_at else self.completion.finish_reason


@dataclass(frozen=True)
class ApiResponse:
    """The answer to one request."""

    wanted: RequestOptions
    context: list[int]
    choices: list[ResponseChoice]

    def whole(self, route: Route, template: Template) -> bytes:
        """Return the answer as one JSON object."""
        form = _chat_choice if route == "chat" else _text_choice
        choices = [form(n, choice, self.wanted, template) for n, choice in enumerate(self.choices)]
        kind = "chat.completion" if route == "chat" else "text_completion"
        body = {**_head(kind, self.wanted.model), "choices": choices, "usage": self.usage()}
        if self.wanted.token_ids:
            body["prompt_token_ids"] = self.context
        return msgspec.json.encode(body)

    def events(self, route: Route, template: Template) -> bytes:
        """Return the answer as server-sent events, including the last one."""
        kind = "chat.completion.chunk" if route == "chat" else "text_completion"
        head = _head(kind, self.wanted.model)
        chunks: list[dict[str, Any]] = []
        for n, choice in enumerate(self.choices):
            if route == "chat":
                chunks += ({**head, "choices": [piece]} for piece in _pieces(n, choice, self.wanted, template))
            else:
                chunks.append({**head, "choices": [_text_choice(n, choice, self.wanted, template)]})
        if self.wanted.usage:
            chunks.append({**head, "choices": [], "usage": self.usage()})
        return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        read, written = len(self.context), sum(len(choice.completion.token_ids) for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def server_event(kind: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    number = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def _chat_choice(index: int, choice: ResponseChoice, wanted: RequestOptions, template: Template) -> dict[str, Any]:
    found = {
        "index": index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "logprobs": _chat_logprobs(choice.completion, template) if wanted.logprobs else None,
    }
    return found | _more(choice, wanted)


def _pieces(index: int, choice: ResponseChoice, wanted: RequestOptions, template: Template) -> Iterator[dict[str, Any]]:
    """Yield a chat message as deltas: its role, its content, its tool calls and its finish reason."""
    message, empty = choice.message, {"index": index, "finish_reason": None, "logprobs": None}
    yield {**empty, "delta": {"role": "assistant", "content": ""}}
    if thought := message.get("reasoning_content"):
        yield {**empty, "delta": {"reasoning_content": thought}}
    if message["content"] or wanted.logprobs:
        logprobs = _chat_logprobs(choice.completion, template) if wanted.logprobs else None
        yield {**empty, "delta": {"content": message["content"] or ""}, "logprobs": logprobs}
    if calls := message.get("tool_calls"):
        yield {**empty, "delta": {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}}
    yield {**empty, "delta": {}, "finish_reason": choice.finish_reason} | _more(choice, wanted)


def _text_choice(index: int, choice: ResponseChoice, wanted: RequestOptions, template: Template) -> dict[str, Any]:
    found = {
        "index": index,
        "text": choice.message["content"],
        "finish_reason": choice.finish_reason,
        "logprobs": _text_logprobs(choice.completion, template) if wanted.logprobs else None,
    }
    return found | _more(choice, wanted)


def _more(choice: ResponseChoice, wanted: RequestOptions) -> dict[str, Any]:
    malformed = {"malformed_tool_calls": list(choice.malformed)} if choice.malformed else {}
    tokens = {"token_ids": choice.completion.token_ids} if wanted.token_ids else {}
    return {"turn": choice.turn} | malformed | tokens


def _chat_logprobs(completion: Completion, template: Template) -> dict[str, Any]:
    told = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = template.decode([token])
        told.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": told}


def _text_logprobs(completion: Completion, template: Template) -> dict[str, Any]:
    tokens, offsets, offset = [template.decode([token]) for token in completion.token_ids], [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": completion.logprobs, "top_logprobs": None, "text_offset": offsets}
