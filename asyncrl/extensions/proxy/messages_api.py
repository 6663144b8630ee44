"""POST /v1/messages, in the form of chats: what Claude Code and other clients of Anthropic's API send and read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from asyncrl.extensions.proxy.answers import ApiResponse, ResponseChoice, server_event
from asyncrl.extensions.proxy.fields import Body
from asyncrl.extensions.proxy.messages import bad_field, tools_of
from asyncrl.schema import Message

_RENAMED = {"stop_sequences": "stop"}
_IGNORED = {"messages", "system", "tools", "tool_choice", "thinking", "cache_control", "context_management"}
_IGNORED |= {"output_config"}  # Claude Code's effort; a form is refused
_CHOICES: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required"}
_BLOCKS = "Must be of type text, image, tool_use, tool_result or thinking."


def as_chat(body: Body) -> Body:
    """Return the request as one for /v1/chat/completions. Raises ApiError (400)."""
    if "n" in body:
        raise bad_field("n", body["n"], "Remove it: one answer is made.")
    output = body.get("output_config")
    if output is not None and (not isinstance(output, dict) or output.get("format") is not None):
        raise bad_field("output_config", output, "Must have no format: what forces a form draws differently.")
    chat = {_RENAMED.get(name, name): value for name, value in body.items() if name not in _IGNORED}
    system = body.get("system")
    head = [{"role": "system", "content": system}] if isinstance(system, str) else _head(system)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise bad_field("messages", given, "Must be a list of messages, one at least.")
    chat["messages"] = [*head, *(one for place, message in enumerate(given) for one in _messages(message, place))]
    if tools := [_tool(tool) for tool in tools_of(body)]:
        chat["tools"] = tools
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = _choice(choice)
    return chat


def _head(system: Any) -> list[Message]:
    """Return the system message of a list of blocks; their marks for a cache have no effect here."""
    if not system:
        return []
    if not isinstance(system, list) or not all(isinstance(block, dict) for block in system):
        raise bad_field("system", system, "Must be a text, or a list of blocks of type text.")
    return [{"role": "system", "content": "\n".join(str(block.get("text", "")) for block in system)}]


def _choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_field("tool_choice", choice, "Must be of type auto, any, tool or none.")
    return _CHOICES[kind]


def _tool(tool: Any) -> Message:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise bad_field("tools", tool, "Must have a name and an input_schema: the model has no tools of a provider.")
    named = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


def _messages(message: Any, place: int) -> Iterator[Message]:
    """Yield the chat messages of one message: results of tools are messages of their own."""
    name = f"messages[{place}]"
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise bad_field(name, message, "Must be an object with the role user or assistant.")
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": message["role"], "content": content}
        return
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, name)}
        elif kind == "tool_use":
            call = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "thinking":
            thoughts += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(_part(block, kind, name))
    if parts or calls:
        more = {"tool_calls": calls, "reasoning_content": thoughts}
        yield {"role": message["role"], "content": parts} | {name: value for name, value in more.items() if value}


def _result(block: Message, name: str) -> Any:
    content = block.get("content")
    if not isinstance(content, list):
        return content
    return [_part(part, part.get("type") if isinstance(part, dict) else None, name) for part in content]


def _part(block: Any, kind: str | None, name: str) -> Message:
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise bad_field(f"{name}.content", block, _BLOCKS)


def whole(answer: ApiResponse, body: Body) -> dict[str, Any]:
    """Return the answer as a message. `turn` is its number for /v1/reward."""
    (choice,) = answer.choices
    usage = answer.usage()
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if choice.stopped_at else reasons.get(choice.finish_reason, "end_turn")
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": answer.wanted.model,
        "content": list(_blocks(choice)),
        "stop_reason": reason,
        "stop_sequence": choice.stopped_at,
        "turn": choice.turn,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _blocks(choice: ResponseChoice) -> Iterator[dict[str, Any]]:
    said = choice.message
    if thought := said.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if said["content"]:
        yield {"type": "text", "text": said["content"]}
    for call in said.get("tool_calls", []):
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": json.loads(function["arguments"]),
        }


def events(answer: ApiResponse, body: Body) -> bytes:
    """Return the answer as the events of a stream."""
    told = whole(answer, body)
    begun = told | {"content": [], "stop_reason": None, "stop_sequence": None}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(told["content"]):
        empty, delta = _streamed(block)
        found.append({"type": "content_block_start", "index": index, "content_block": block | empty})
        found.append({"type": "content_block_delta", "index": index, "delta": delta})
        found.append({"type": "content_block_stop", "index": index})
    ended = {name: told[name] for name in ("stop_reason", "stop_sequence")}
    found.append({"type": "message_delta", "delta": ended, "usage": told["usage"]})
    found.append({"type": "message_stop"})
    return b"".join(server_event(event["type"], event) for event in found)


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the beginning of a block has in place of its content, and the rest of it."""
    if block["type"] == "tool_use":
        return {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    name = "text" if block["type"] == "text" else "thinking"
    return {name: ""}, {"type": f"{name}_delta", name: block[name]}
