"""Tools in a system message, for models whose chat template ignores tools, such as SmolLM2's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncrl.extensions.tools.calls import known
from asyncrl.schema import Message, Template

_HEAD = "You can call functions. Here are their signatures, as JSON, one in a line:\n<tools>\n{tools}\n</tools>\n"
_HOW = {
    "hermes": (
        "To call one, write its name and arguments as JSON within <tool_call></tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    ),
    "llama3_json": (
        "To call one, answer with nothing but JSON of its name and arguments, and with ; between two calls:\n"
        '{"name": <function-name>, "parameters": <arguments-object>}'
    ),
    "pythonic": (
        "To call some, answer with nothing but a list of calls with named arguments:\n"
        "[function_name(argument=value), function_name(argument=value)]"
    ),
}


def tools_in_system(messages: Sequence[Message], tools: Sequence[Message], format: str = "hermes") -> list[Message]:
    """Return the messages with the tools (in the OpenAI API's form) described in the system message: appended to it, or
    in a new one in front. `format` is the call format (calls.parse)."""
    if not tools:
        return list(messages)
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _HEAD.format(tools=signatures) + _HOW[known(format, "format")]
    first = messages[0] if messages else {}
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_tools_shown(question: dict[str, Any], template: Template) -> dict[str, Any]:
    """Return a question whose tools are described in the system message if the chat template ignores them."""
    tools = question.get("tools", ())
    if not ignores_tools(template, tools):
        return question
    form = question.get("tool_format", "hermes")
    return {**question, "messages": tools_in_system(question["messages"], tools, form)}


def ignores_tools(template: Template, tools: Sequence[Message]) -> bool:
    """Return whether a chat template shows nothing of the tools."""
    messages = [{"role": "user", "content": "1"}]
    return bool(tools) and template.begin(messages, tools) == template.begin(messages)
