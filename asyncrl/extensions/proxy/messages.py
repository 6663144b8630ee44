"""Canonical form of messages, in which they are compared and rendered regardless of how a client writes them.

absent, null, "", [], {}    are the same
content                     a text; parts of type text are joined with newlines, unless there are images among them
a call's arguments          a value instead of JSON text, so that templates write it in their model's format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.extensions.tools.calls import ToolCall, nested_too_deep
from asyncrl.images import ImageRefused, images_in
from asyncrl.schema import Message

_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class CanonicalMessage:
    """A message in canonical form."""

    key: bytes  # equal for equivalent messages
    rendered: Message
    calls: int  # number of tool calls


def read_all(messages: Any) -> list[CanonicalMessage]:
    """Read the messages of a request. Raises ApiError (400)."""
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", messages, "Must be a list of messages, one at least.")
    return [read(message, f"messages[{n}]") for n, message in enumerate(messages)]


def read(message: Any, name: str = "message") -> CanonicalMessage:
    """Read one message. Raises ApiError (400), which refers to the message as `name`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_field(name, message, "Must be an object with a role.")
    if message.get("function_call") is not None:
        raise bad_field(f"{name}.function_call", message["function_call"], "Use tool_calls.")
    normal = {field: value for field, value in message.items() if value not in _EMPTY}
    if "content" in normal:
        normal["content"] = _text(normal["content"], f"{name}.content")
    calls = normal.get("tool_calls", [])
    if calls:
        normal["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    compared = {name: value for name, value in normal.items() if name != "reasoning_content"}  # clients may drop it
    key = msgspec.json.encode(compared, order="deterministic")
    return CanonicalMessage(key, {"content": "", **normal}, len(calls))


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a request; none if it has none. Raises ApiError (400)."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise bad_field("tools", tools, "Must be a list of tools.")
    return tools or []


def tools_key(tools: Any) -> bytes:
    """Return a key that is equal for the same tools. Raises ApiError (400)."""
    for tool in tools_of({"tools": tools}):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field("tools", tools, 'Must be a list of {"type": "function", "function": {"name": ..., ...}}.')
    return msgspec.json.encode(tools, order="deterministic")


def assistant(content: str, calls: Sequence[ToolCall]) -> Message:
    """Return the model's answer as the message that clients get and send back."""
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]
    return message


def without_thoughts(text: str) -> tuple[str, str]:
    """Return the thoughts at the beginning of an answer, and the rest. The template may have opened the tag."""
    thought, closed, rest = text.partition("</think>")
    if closed:
        return thought.removeprefix("<think>").strip("\n"), rest.lstrip("\n")
    return (text.removeprefix("<think>").strip("\n"), "") if text.startswith("<think>") else ("", text)


def _text(content: Any, name: str) -> str | list[Message]:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    try:
        if images_in([{"content": parts}]):
            return [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    except ImageRefused as refused:
        raise bad_field(name, content, str(refused)) from None
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise bad_field(name, content, "Must be a text, or a list of parts of type text or image_url.")
    return "\n".join(texts)


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    try:
        return [
            {
                "id": call.get("id") or "",
                "type": call.get("type") or "function",
                "function": {"name": call["function"]["name"], "arguments": _value(call["function"].get("arguments"))},
            }
            for call in calls
        ]
    except (KeyError, TypeError, AttributeError):
        remedy = 'Must be a list of {"id": ..., "function": {"name": ..., "arguments": ...}}.'
        raise bad_field(name, calls, remedy) from None


def _value(arguments: Any) -> Any:
    """Return the value of a call's arguments, or their text if it is not valid JSON or nested too deep, because
    templates that write a value (`tojson`) are recursive."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return arguments if nested_too_deep(value) else value


TYPES = {401: "authentication_error", 410: "session_closed", 503: "engine_error"}


class ApiError(AsyncRLError):
    """Raised to answer a request with this HTTP status and an error. `param` names the field of the request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self._param, self._code = status, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the error in the OpenAI API's format."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self._param, "code": self._code}
        return {"type": "error", "error": error}  # Anthropic's clients read the first field


def bad_field(param: str, value: object, remedy: str) -> ApiError:
    """Return a 400 error for one field, which states the field, the value and the remedy."""
    told = repr(value)
    told = told if len(told) <= 200 else f"{told[:200]}..."
    return ApiError(400, f"{param}: got {told}. {remedy}", param=param)
