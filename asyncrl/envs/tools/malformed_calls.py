"""Detection of malformed tool calls: what calls.parse left in the text, with an explanation for the model."""

from __future__ import annotations

import json
import re

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
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
