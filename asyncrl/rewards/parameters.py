"""Validation of a reward's params against the annotations of the callable that takes them: names, types and ranges.

A class declares `votes` as `Annotated[int, Field(ge=1)]`, and a configuration with "three" or `vote` is refused before
a run starts. Annotations that pydantic does not know, or that exist only for type checkers, accept anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from asyncrl.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Urls = Annotated[list[Annotated[str, Field(pattern="^https?://")]], Field(strict=False)]
Range = Annotated[tuple[float, float], Field(strict=False)]  # YAML and JSON have lists only

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def check(target: Callable[..., Any], params: Mapping[str, Any], field: str, given: int = 0) -> None:
    """Raise ConfigError for the first parameter that does not fit. The first `given` positional arguments are not
    parameters."""
    signature = inspect.signature(target)
    named = [one for one in list(signature.parameters.values())[given:] if one.kind is not one.VAR_POSITIONAL]
    known = [one.name for one in named if one.kind is not one.VAR_KEYWORD]
    anything = len(known) < len(named)
    for name in params:
        if name not in known and not anything:
            raise ConfigError(
                f"{field}.{name}", params[name], f"Unknown parameter: the function takes {known or 'no parameters'}."
            )
    for one in named:
        if one.name in known and one.default is one.empty and one.name not in params:
            raise ConfigError(f"{field}.{one.name}", None, "It must be given.")
    hints = _hints(target)
    for name, value in params.items():
        _check_one(hints.get(name, Any), value, f"{field}.{name}")


def _check_one(hint: Any, value: object, field: str) -> None:
    try:
        adapter = TypeAdapter(hint, config=_STRICT)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([field, *map(str, first["loc"])])
        raise ConfigError(path, first["input"], f"{first['msg']}.") from None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}
