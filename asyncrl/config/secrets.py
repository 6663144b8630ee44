"""Values of parameters that stand in the environment: in memory by value, on disk by name.

    task.reward_params.api_key: ${oc.env:JUDGE_KEY}     as a user writes it, or {env: JUDGE_KEY}
    {"env": "JUDGE_KEY"}                                in config.json, recordings and checkpoints
    {"env": "Bearer ${JUDGE_KEY}"}                      a longer text around one

Each process that reads the configuration takes the value from its own environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from string import Template
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

REFERENCE = "env"
"""The one key of a mapping that stands for such a value."""


class Secret(str):
    """The value. It is written, copied and shown as its reference; other processes are sent the plain text."""

    reference: str  # a variable's name, or a text with ${NAME} in it
    missing: list[str]  # variables that this process's environment lacks

    def __new__(cls, reference: str, environment: Mapping[str, str] = os.environ) -> Secret:
        """What the variables of the reference hold now."""
        template = Template(reference if "${" in reference else f"${{{reference}}}")
        made = super().__new__(cls, template.safe_substitute(environment))
        made.reference = reference
        made.missing = [name for name in template.get_identifiers() if name not in environment]
        return made

    def __repr__(self) -> str:
        return f"{{{REFERENCE}: {self.reference}}}"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


def opened(value: Any) -> Any:
    """Parameters whose references are Secrets. The parameters themselves are none, whatever their names."""
    if isinstance(value, dict):
        return {name: _opened(item) for name, item in value.items()}
    return [opened(item) for item in value] if isinstance(value, list) else value


def closed(value: Any) -> Any:
    """The same with references again, as it may be written."""
    if isinstance(value, Secret):
        return {REFERENCE: value.reference}
    if isinstance(value, dict):
        return {name: closed(item) for name, item in value.items()}
    return [closed(item) for item in value] if isinstance(value, list | tuple) else value


def _opened(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {REFERENCE} and isinstance(value[REFERENCE], str):
        return Secret(value[REFERENCE])
    if isinstance(value, dict):
        return {name: _opened(item) for name, item in value.items()}
    return [_opened(item) for item in value] if isinstance(value, list) else value


def secrets(value: Any, field: str = "") -> Iterator[tuple[str, Secret]]:
    """All of them in a section, its lists and mappings, by field."""
    if isinstance(value, Secret):
        yield field, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from secrets(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from secrets(item, f"{field}.{place}")
    elif hasattr(type(value), "model_fields"):
        yield from secrets(vars(value), field)


Parameters = Annotated[dict[str, Any], BeforeValidator(opened), PlainSerializer(closed)]
"""Of what is named by import path or kind: ours do not know their names."""
FREE = ("params", "agent_params", "reward_params", "tools", "tool_options", "request_fields")
"""The fields of this kind."""
