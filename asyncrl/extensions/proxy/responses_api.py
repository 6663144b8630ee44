"""POST /v1/responses, in the form of chats: what Codex and other clients of OpenAI's Responses API send and read.

Every request has the whole history (`store: false`, as Codex does it): the proxy keeps no responses. Functions may
stand in a namespace, and in items of type additional_tools, as those of Codex' default models do. The model knows one
in a namespace as NAMESPACE__NAME, and the client gets both names back. A custom tool, whose input is a text, is to the
model a function of one text.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.extensions.proxy.answers import ApiResponse, ResponseChoice, server_event
from asyncrl.extensions.proxy.fields import Body
from asyncrl.extensions.proxy.messages import bad_field, tools_of
from asyncrl.schema import Message

_RENAMED = {"max_output_tokens": "max_tokens"}
_IGNORED = {"input", "instructions", "tools", "tool_choice", "include", "reasoning", "text", "truncation", "background"}
_IGNORED |= {"client_metadata"}  # Codex's
_KINDS = {"input_text", "output_text", "text", "refusal"}
_SAID = {"content", "tool_calls"}
_MORE_TOOLS = "additional_tools"
_CUSTOM = "custom_tool_call"
_OF_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_OWN_NAMESPACE = "functions"
"""Namespace that Codex gives to functions without one."""


def as_chat(body: Body) -> Body:
    """Return the request as one for /v1/chat/completions. Raises ApiError (400)."""
    if "n" in body:
        raise bad_field("n", body["n"], "Remove it: one answer is made.")
    if body.get("previous_response_id") or body.get("conversation"):
        name = "previous_response_id" if body.get("previous_response_id") else "conversation"
        raise bad_field(name, body[name], "Remove it, and send the whole input: responses are not kept.")
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if form is not None and (not isinstance(form, dict) or form.get("type", "text") != "text"):
        raise bad_field("text.format", form, "Must be text: what forces a form draws differently.")
    given = {name: value for name, value in body.items() if name not in _IGNORED}
    for name in ("previous_response_id", "conversation", "prompt_cache_retention"):
        given.pop(name, None)
    chat = {_RENAMED.get(name, name): value for name, value in given.items()}
    head = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat["messages"] = [*head, *_messages(body.get("input"))]
    if tools := [tool for tool, _ in _functions(body).values()]:
        chat["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": _shown(choice)}}
    return chat | ({} if choice is None else {"tool_choice": choice})


def _messages(given: Any) -> Iterator[Message]:
    """Yield chat messages. Text, thoughts and calls of the model that follow each other are one message."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise bad_field("input", given, "Must be a text, or a list of items.")
    said: Message = {}
    for place, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == _MORE_TOOLS:
            continue
        if kind in ("function_call", _CUSTOM):
            written = json.dumps({"input": item.get("input")}) if kind == _CUSTOM else item.get("arguments") or ""
            call = {"name": _shown(item), "arguments": written}
            said.setdefault("role", "assistant")
            said.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "reasoning":
            said |= {"role": "assistant", "reasoning_content": _thought(item.get("content"))}
        elif kind == "message" and item.get("role") == "assistant":
            if said.keys() & _SAID:
                yield said
                said = {}
            said |= {"role": "assistant", "content": _content(item.get("content"), place)}
        else:
            if said.keys() & _SAID:
                yield said
            said = {}
            yield _other(item, kind, place)
    if said.keys() & _SAID:
        yield said


def _other(item: Message, kind: str, place: int) -> Message:
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        return {"role": role, "content": _content(item.get("content"), place)}
    if kind in ("function_call_output", f"{_CUSTOM}_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), place)}
    remedy = "Must be of type message, function_call, function_call_output or reasoning."
    raise bad_field(f"input[{place}].type", kind, remedy)


def _content(content: Any, place: int) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _KINDS:
            parts.append({"type": "text", "text": part.get("refusal") if kind == "refusal" else part.get("text")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise bad_field(f"input[{place}].content", part, "Must be a part of type input_text or input_image.")
    return parts


def _thought(content: Any) -> str:
    """Return the text of an item of type reasoning; a provider's own has none, but a summary or encrypted content."""
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _functions(body: Body) -> dict[Any, tuple[Message, Message]]:
    """Return each tool of a request, and the names by which its client knows it, by the name that the model sees.
    Raises ApiError (400) for what is no function, and for several of one name."""
    items = body.get("input")
    more = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    sources = [body, *(item for item in more if item.get("type") == _MORE_TOOLS)]
    found: dict[Any, tuple[Message, Message]] = {}
    for tool, names in (one for source in sources for one in _flat(tools_of(source))):
        shown = _shown(names)
        named = {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
        function = {"type": "function", "function": {"name": shown, **named}}
        if found.setdefault(shown, (function, names)) != (function, names):
            raise bad_field("tools", shown, "Two tools have this name: rename one.")
    return found


def _flat(tools: Sequence[Any], namespace: str | None = None) -> Iterator[tuple[Message, Message]]:
    """Yield functions, those of namespaces too, with their own names. Raises ApiError (400)."""
    for tool in tools:
        kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else (None, None)
        if kind == "namespace" and namespace is None and isinstance(name, str):
            yield from _flat(tools_of(tool), name)
        elif kind == "function" and isinstance(name, str):
            yield tool, {"name": name} | ({} if namespace is None else {"namespace": namespace})
        elif kind == "custom" and isinstance(name, str):
            form = tool.get("format")
            given = [tool.get("description"), form.get("definition") if isinstance(form, dict) else None]
            told = "\n\n".join(str(text) for text in given if text)  # what it does, and the grammar of its text
            function = {"description": told, "parameters": _OF_TEXT}
            yield function, {"type": _CUSTOM, "name": name} | ({} if namespace is None else {"namespace": namespace})
        else:
            shown = {"type": kind, "name": name} if kind else tool
            remedy = "Must be a function or a custom tool: the model has no tools of a provider. Turn it off."
            raise bad_field("tools", shown, remedy)


def _shown(names: Message) -> Any:
    """Return the name by which the model knows a function."""
    namespace = names.get("namespace")
    return names.get("name") if namespace in (None, _OWN_NAMESPACE) else f"{namespace}__{names.get('name')}"


def whole(answer: ApiResponse, body: Body) -> dict[str, Any]:
    """Return the answer as a response. `turn` is its number for /v1/reward."""
    (choice,) = answer.choices
    usage = answer.usage()
    cut = choice.finish_reason == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": answer.wanted.model,
        "output": list(_items(choice, _functions(body))),
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "turn": choice.turn,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(choice: ResponseChoice, functions: Mapping[Any, tuple[Message, Message]]) -> Iterator[dict[str, Any]]:
    said, status = choice.message, "incomplete" if choice.finish_reason == "length" else "completed"
    if thought := said.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        yield {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": content}
    if said["content"] or not said.get("tool_calls"):
        content = [{"type": "output_text", "text": said["content"] or "", "annotations": [], "logprobs": []}]
        name = f"msg_{uuid.uuid4().hex}"
        yield {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}
    for call in said.get("tool_calls", []):
        told = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "status": status}
        _, names = functions.get(call["function"]["name"], ({}, {}))
        item = told | call["function"] | names
        if item["type"] == _CUSTOM:
            arguments = item.pop("arguments")
            text = json.loads(arguments).get("input")
            item["input"] = text if isinstance(text, str) else arguments  # the tool tells the model what is wrong
        yield item


def events(answer: ApiResponse, body: Body) -> bytes:
    """Return the answer as the events of a stream."""
    numbers, told = itertools.count(), whole(answer, body)
    begun = told | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    found: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(told["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        found.append(("response.output_item.added", {"output_index": index, "item": _begun(item)}))
        if item["type"] in ("message", "reasoning"):
            (part,) = item["content"]
            place = {**at, "content_index": 0}
            text = place | ({"logprobs": []} if item["type"] == "message" else {})
            found += [
                ("response.content_part.added", {**place, "part": part | {"text": ""}}),
                (f"response.{part['type']}.delta", {**text, "delta": part["text"]}),
                (f"response.{part['type']}.done", {**text, "text": part["text"]}),
                ("response.content_part.done", {**place, "part": part}),
            ]
        elif item["type"] == "function_call":
            written = item["arguments"]
            found.append(("response.function_call_arguments.delta", {**at, "delta": written}))
            done = {**at, "name": item["name"], "arguments": written}
            found.append(("response.function_call_arguments.done", done))
        elif item["type"] == _CUSTOM:
            found.append(("response.custom_tool_call_input.delta", {**at, "delta": item["input"]}))
            found.append(("response.custom_tool_call_input.done", {**at, "input": item["input"]}))
        found.append(("response.output_item.done", {"output_index": index, "item": item}))
    found.append((f"response.{told['status']}", {"response": told}))
    return b"".join(
        server_event(kind, {"type": kind, "sequence_number": next(numbers), **data}) for kind, data in found
    )


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        _CUSTOM: {"input": ""},
        "reasoning": {"content": []},
    }
    status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
    return item | empty[item["type"]] | status
