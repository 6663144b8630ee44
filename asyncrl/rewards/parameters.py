"""Validation of a reward's params against the annotations of the callable that takes them: names, types and ranges.

A class declares `votes` as `Annotated[int, Field(ge=1)]`, and a configuration with "three" or `vote` is refused before
a run starts. Annotations that pydantic does not know, or that exist only for type checkers, accept anything. A class
with many params declares them as fields of a model, `Settings`, an object of which its constructor takes.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from asyncrl.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Urls = Annotated[list[Annotated[str, Field(pattern="^https?://")]], Field(strict=False)]
Range = Annotated[tuple[float, float], Field(strict=False)]  # YAML and JSON have lists only

Model = TypeVar("Model", bound=BaseModel)
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def check(target: Callable[..., Any], params: Mapping[str, Any], field: str, given: int = 0) -> None:
    """Raise ConfigError for the first parameter that does not fit. The first `given` positional arguments are not
    parameters."""
    signature = inspect.signature(target)
    named = [one for one in list(signature.parameters.values())[given:] if one.kind is not one.VAR_POSITIONAL]
    known = [one.name for one in named if one.kind is not one.VAR_KEYWORD]
    anything = len(known) < len(named)
    if not anything:
        _check_names(params, known, field)
    for one in named:
        if one.name in known and one.default is one.empty and one.name not in params:
            raise ConfigError(f"{field}.{one.name}", None, "It must be given.")
    hints = _hints(target)
    for name, value in params.items():
        _check_one(hints.get(name, Any), value, f"{field}.{name}")


def settings_of(model: type[Model], params: Mapping[str, Any], field: str) -> Model:
    """Return the params as the settings of a class. Raises ConfigError for the first that does not fit."""
    _check_names(params, list(model.model_fields), field)
    try:
        return model.model_validate(dict(params))
    except ValidationError as error:
        raise _refused(error, field) from None


def _check_names(params: Mapping[str, Any], known: Sequence[str], field: str) -> None:
    for name, value in params.items():
        if name not in known:
            near = [f" The nearest is {one}." for one in difflib.get_close_matches(name, known, n=1)]
            remedy = f"Unknown parameter: the function takes {known or 'no parameters'}.{''.join(near)}"
            raise ConfigError(f"{field}.{name}", value, remedy)


def _refused(error: ValidationError, field: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = ".".join([field, *map(str, first["loc"])])
    if first["type"] == "missing":
        return ConfigError(path, None, "It must be given.")
    return ConfigError(path, first["input"], f"{first['msg']}.")


def _check_one(hint: Any, value: object, field: str) -> None:
    try:
        adapter = TypeAdapter(hint, config=_STRICT)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise _refused(error, field) from None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}
