"""Plain functions as tools: name, description and schema come from the signature and the docstring.

    def weather(city: str, days: int = 1) -> str:
        '''The forecast for a city.

        Args:
            city: its name, in English
            days: how many, at most 7
        '''

An async function runs in the event loop, a plain one in a thread of its own (threads.py).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, get_type_hints

from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from typing_extensions import TypedDict

from asyncrl.extensions.tools.threads import ThreadRunner
from asyncrl.extensions.tools.tool import OnFault, Schema, ToolOutput

_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_NAMED = ("properties", "$defs")
"""Keywords of a schema whose keys are names."""
_SECTION = re.compile(r"^[A-Z]\w*:$")


class FunctionTool:
    """Tool that calls a function, with the description that the model reads."""

    def __init__(
        self, function: Callable[..., Any], *, timeout: float | None = None, on_fault: OnFault | None = None
    ) -> None:
        """Derive name, description and schema. Raises ValueError for a function that cannot be called with JSON
        arguments."""
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.timeout, self.on_fault = timeout, on_fault
        self.description, told = documented(inspect.getdoc(function) or "")
        self._function, self._threads = function, ThreadRunner(self.name)
        self._arguments, self.parameters = _parameters(function, self.name, told)

    async def call(self, arguments: dict[str, Any]) -> ToolOutput:
        """Return the function's result: text unchanged, bytes as an image, a list with bytes as several parts, anything
        else as JSON."""
        values = self._arguments.validate_python(arguments)  # converts to the types of the signature
        if inspect.iscoroutinefunction(self._function):
            return _output(await self._function(**values))
        return await self._threads.call(lambda: _output(self._function(**values)))


def documented(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description, and what its `Args:` section says about each argument."""
    description, told = list[str](), dict[str, str]()
    section, name, width = "", "", 0
    for line in text.splitlines():
        if _SECTION.match(line):
            section = line
        elif not section:
            description.append(line)
        elif section == "Args:" and line.strip():
            indent = len(line) - len(line.lstrip())
            found = _ARGUMENT.match(line.strip())
            if found and (not told or indent <= width):
                (name, told[found[1]]), width = found.groups(), indent
            elif name:
                told[name] += f" {line.strip()}"
    return "\n".join(description).strip(), told


def _parameters(function: Callable[..., Any], name: str, told: Mapping[str, str]) -> tuple[TypeAdapter[Any], Schema]:
    """Return the validator of a call's arguments, and their schema."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{name}: its parameter {parameter} cannot be passed by keyword")
        kind = hints.get(parameter.name, Any)
        fields[parameter.name] = kind if parameter.default is parameter.empty else NotRequired[kind]
    try:
        adapter = TypeAdapter(TypedDict(name, fields))  # type: ignore[operator]
        schema = _untitled(adapter.json_schema())
    except PydanticSchemaGenerationError as error:
        raise ValueError(f"{name}: a parameter has a type that JSON cannot represent: {error}") from None
    properties: dict[str, Schema] = schema.setdefault("properties", {})
    for parameter in signature.parameters.values():
        if text := told.get(parameter.name):
            properties[parameter.name].setdefault("description", text)
        if parameter.default is not parameter.empty and isinstance(parameter.default, bool | int | float | str):
            properties[parameter.name]["default"] = parameter.default
    schema["additionalProperties"] = False
    Draft202012Validator.check_schema(schema)
    return adapter, schema


def _untitled(schema: Any) -> Any:
    """Return the schema without the titles that pydantic derives from names, which tell the model nothing."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: {name: _untitled(one) for name, one in schema[key].items()} for key in _NAMED if key in schema}
    return {key: _untitled(value) for key, value in schema.items() if key != "title"} | named


def _output(value: Any) -> ToolOutput:
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(one, bytes) for one in values):
        return _text(value)
    return [
        {"type": "image", "image": one} if isinstance(one, bytes) else {"type": "text", "text": _text(one)}
        for one in values
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
