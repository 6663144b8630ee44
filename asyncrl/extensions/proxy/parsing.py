"""Tool calls in a model's text, in the formats of the extension `tools` and of SGLang's detectors (sglang:NAME).

SGLang reads the calls of many more models, but drops or repairs what is malformed. Here the text is kept if no call is
found in it, and a malformed call is said to be so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from asyncrl import platforms
from asyncrl.errors import ConfigError
from asyncrl.extensions.proxy.messages import bad_field
from asyncrl.extensions.tools import calls as tool_calls
from asyncrl.extensions.tools.calls import ToolCall

SGLANG = "sglang:"
BEGINNINGS = {
    "hermes": ('<tool_call>\n{{"name": "', '<tool_call>\n{{"name": "{name}", "arguments": '),
    "llama3_json": ('{{"name": "', '{{"name": "{name}", "parameters": '),
    "pythonic": ("[", "[{name}("),
}
"""What an answer begins with that must be a call: of any tool, and of the one that is named."""


@dataclass(frozen=True)
class Parsed:
    """An answer without its calls, and the calls."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """What is wrong with each call that stayed in the text."""


def known(format: str, setting: str) -> str:
    """Return the name of a format. Raises ConfigError for the setting; SGLang's names are checked by `load`, because
    they need its import."""
    return format if format.startswith(SGLANG) else tool_calls.known(format, setting)


@cache
def _sglang() -> tuple[Any, Any]:
    """Return SGLang's classes of tools and of parsers. Their import takes seconds, once in a process."""
    platforms.here().prepare_engine()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return Tool, FunctionCallParser


@cache
def load(format: str) -> Any:
    """Return what makes a parser for a format of SGLang's detectors; None for other formats. Raises ConfigError."""
    if not format.startswith(SGLANG):
        return None
    tool_class, parser_class = _sglang()
    names = sorted(parser_class.ToolCallParserEnum)
    name = format.removeprefix(SGLANG)
    if name not in names:
        raise ConfigError("agent_params.tool_format", format, f"Behind {SGLANG} must be one of {', '.join(names)}.")
    return lambda tools: parser_class([tool_class.model_validate(tool) for tool in tools], name)


def parse(text: str, format: str, tools: Sequence[Any], *, before: int = 0) -> Parsed:
    """Return what an answer says and calls. `before` is the number of earlier calls in the conversation."""
    if make := load(format):
        try:
            parser = make(tools)
        except ValueError as error:
            raise bad_field("tools", tools, f"SGLang does not read them: {error}.") from None
        return _detected(text, parser, before)
    rest, calls = tool_calls.parse(text, format, before=before)
    return Parsed(rest, calls, tool_calls.malformed_calls(rest, format))


def _detected(text: str, parser: Any, before: int) -> Parsed:
    if not parser.has_tool_call(text):
        return Parsed(text)
    try:
        rest, found = parser.parse_non_stream(text)
        calls = [_call(one.name, one.parameters, before + number) for number, one in enumerate(found)]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        return Parsed(text, malformed=[f"The call cannot be read: {error}."])
    if not calls:
        return Parsed(text, malformed=["The call is not well-formed, or is of a tool that is not there."])
    return Parsed(rest.strip(), calls)


def _call(name: str, parameters: str, number: int) -> ToolCall:
    arguments = json.loads(parameters or "{}")
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    return ToolCall(name, arguments, f"call{number:05d}")


def forced(choice: Any, tools: Sequence[Any], format: str) -> str:
    """Return what the answer to a request begins with, so that it is a call; empty if it need not be one. Raises
    ApiError (400). It is part of what the model reads: nothing else changes how tokens are drawn."""
    if choice in ("auto", "none"):
        return ""
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    offered = [tool["function"]["name"] for tool in tools]
    if choice != "required" and name not in offered:
        remedy = f"Must be auto, none, required, or a function of {offered}."
        raise bad_field("tool_choice", choice, remedy)
    if not offered:
        raise bad_field("tool_choice", choice, "There are no tools to call: send some, or remove it.")
    if format not in BEGINNINGS:
        raise bad_field("tool_choice", choice, f"Must be auto or none: how calls of {format} begin is not known.")
    any_call, of_one = BEGINNINGS[format]
    return (of_one if name else any_call).format(name=name)
