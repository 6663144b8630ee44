"""Parameter values that come from environment variables: kept as values in memory and as references on disk.

    task.reward_params.api_key: ${oc.env:JUDGE_KEY}     as a user writes it, or {env: JUDGE_KEY}
    {"env": "JUDGE_KEY"}                                in config.json, recordings and checkpoints
    {"env": "Bearer ${JUDGE_KEY}"}                      a longer text that contains the value

Each process that reads the configuration takes the value from its own environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from string import Template
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer

REFERENCE = "env"
"""Only key of a mapping that represents such a value."""


class Secret(str):
    """A string whose value comes from environment variables. It is serialized, copied and displayed as its reference;
    pickling, which is how other processes receive it, produces the plain text."""

    reference: str  # name of a variable, or a text that contains ${NAME}
    missing: list[str]  # variables that are not set in this process's environment

    def __new__(cls, reference: str, environment: Mapping[str, str] = os.environ) -> Secret:
        """Create the string from the current values of the referenced variables."""
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
    """Return the parameters with their references replaced by Secrets. The top-level mapping itself is never treated as
    a reference, whatever its keys."""
    if isinstance(value, dict):
        return {name: _opened(item) for name, item in value.items()}
    return [opened(item) for item in value] if isinstance(value, list) else value


def closed(value: Any) -> Any:
    """Return the value with its Secrets replaced by references, safe to write to disk."""
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
    """Yield every Secret in a section, including nested lists and mappings, with its field."""
    if isinstance(value, Secret):
        yield field, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from secrets(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from secrets(item, f"{field}.{place}")
    elif hasattr(type(value), "model_fields"):
        yield from secrets({**vars(value), **(value.model_extra or {})}, field)


Parameters = Annotated[dict[str, Any], BeforeValidator(opened), PlainSerializer(closed)]
"""Free-form parameters of whatever is named by an import path or a kind; the schema does not know their names."""
FREE = ("params", "agent_params", "reward_params", "tools", "tool_options", "chat_template_kwargs")
"""Names of the core's fields of this type."""


def free_fields(sections: Iterable[type[BaseModel]]) -> set[str]:
    """Return the names of the fields of this type in these sections, which are those of extensions."""
    return {
        name
        for section in sections
        for name, field in section.model_fields.items()
        if any(getattr(one, "func", None) is opened for one in field.metadata)
    }
