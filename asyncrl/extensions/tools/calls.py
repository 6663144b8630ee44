"""Parser of tool calls in a model's text, in the formats that models are trained on.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
                  Hermes, Qwen2.5, Qwen3. Several tags for several calls, or a list in one tag (SmolLM2); the last tag
                  may lack its end.
    llama3_json   {"name": "add", "parameters": {"a": 1}}
                  Llama 3.1 and 3.2. Nothing else stands in the text but ";" between calls.
    pythonic      [add(a=1), add(a=2)]
                  Llama 3.2 and 4. Nothing else stands in the text; arguments are literals.

Malformed calls stay in the text, for the model's next turn and for the count of malformed calls.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.errors import ConfigError

MOST_NESTED = 64
"""Maximum nesting of lists and objects in what a model or an agent sends, because their readers are recursive."""


@dataclass(frozen=True)
class ToolCall:
    """Call of a function. `id` names it within its conversation and has nine letters and digits, which is all that
    Mistral's templates accept."""

    name: str
    arguments: dict[str, Any]
    id: str


_Call = tuple[str, dict[str, Any]]
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str, format: str, *, before: int = 0) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and the calls. `before` is the number of earlier calls in the conversation.
    The ids depend on nothing else, so an episode that is played again after a resume makes the same requests."""
    rest, calls = _FORMATS[format](text)
    return rest, [ToolCall(name, arguments, f"call{before + n:05d}") for n, (name, arguments) in enumerate(calls)]


def known(format: str, field: str) -> str:
    """Return the name of a format. Raises ConfigError for `field` if it is unknown."""
    if format not in _FORMATS:
        raise ConfigError(field, format, f"Must be one of {', '.join(_FORMATS)}.")
    return format


def _hermes(text: str) -> tuple[str, list[_Call]]:
    calls: list[_Call] = []

    def take(block: re.Match[str]) -> str:
        try:
            value = _json(block[1])
            calls.extend([_call(one, "arguments") for one in (value if isinstance(value, list) else [value])])
        except (ValueError, RecursionError):
            return block[0]
        return ""

    rest = _BLOCK.sub(take, text)
    return (rest.strip(), calls) if calls else (text, [])


def _llama3_json(text: str) -> tuple[str, list[_Call]]:
    left, calls = text.strip().removeprefix("<|python_tag|>"), list[_Call]()
    decoder = json.JSONDecoder(parse_constant=_refuse)
    try:
        while left:
            value, end = decoder.raw_decode(left)
            calls.append(_call(value, "parameters" if "parameters" in value else "arguments"))
            left = left[end:].strip()
            if left and not left.startswith(";"):
                return text, []
            left = left[1:].strip()
    except (ValueError, TypeError, RecursionError):
        return text, []
    return ("", calls) if calls else (text, [])


def _pythonic(text: str) -> tuple[str, list[_Call]]:
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            return text, []
        return "", [_python_call(node) for node in listed.elts]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # errors of ast on malformed text
        return text, []


def _python_call(node: ast.expr) -> _Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call by keywords")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.loads(json.dumps(arguments, allow_nan=False))  # rejects sets and bytes


def _call(value: Any, arguments: str) -> _Call:
    """Build a call. Raises ValueError if the value is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("not a call")
    given = value.get(arguments, {})
    if not isinstance(given, dict):
        raise ValueError("arguments that are no object")
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # rejects infinities (1e999) and lone surrogates
    return value["name"], given


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_FORMATS: dict[str, Callable[[str], tuple[str, list[_Call]]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
}


def nested_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than MOST_NESTED levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


_JSON_CALL = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*\{.*\"name\"\s*:.*\"(?:parameters|arguments)\"\s*:", re.DOTALL)
_PYTHON_CALL = re.compile(r"\A\s*\[\s*[A-Za-z_][\w.]*\s*\(")


def malformed_calls(text: str, format: str) -> list[str]:
    """Return what is wrong with each call that `calls.parse` left in the text; empty if the text contains none."""
    if format == "hermes":
        return [_json_slip(block, "arguments") for block in _BLOCK.findall(text)]
    if format == "llama3_json":
        return [_json_slip(text.strip(), "parameters")] if _JSON_CALL.match(text) else []
    if _PYTHON_CALL.match(text):
        return ["The call is not of the form [name(argument=value)], with JSON-like values and nothing around it."]
    return []


def _json_slip(text: str, arguments: str) -> str:
    form = f'{{"name": "...", "{arguments}": {{...}}}}'
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        return f"The call is not JSON of the form {form}: {why}."
    return f"The call is not of the form {form}."
