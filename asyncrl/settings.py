"""Base classes of config sections, the constrained number types they use, and rules between settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Million = Annotated[int, Field(ge=1, le=1_000_000)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
AboveOne = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]
Bounds = Annotated[tuple[NonNegative, Positive], Field(strict=False)]  # YAML and JSON only have lists
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")]
"""A name that is safe inside config fields and metric names."""
Dtype = Literal["auto", "bfloat16", "float32"]
"""Number format of weights and activations; the launcher resolves auto (launch/precision.py)."""


class Section(BaseModel):
    """A group of settings: immutable, strictly typed, and closed to unknown names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        serialize_by_alias=True,
    )  # JSON has no infinity: the other processes would read null


class Choice(Section):
    """An algorithm and its settings: `{name: gspo, clip_low: 3e-4}`, or its name alone."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings by name."""
        return dict(self.model_extra or {})

    @property
    def is_own(self) -> bool:
        """Return whether it is the user's own, given by an import path, module:name."""
        return ":" in self.name


Rule = tuple[str, bool, str] | tuple[str, Any, bool, str]
"""Field, whether its value breaks the rule, and the remedy. To show another value than the field's, it comes second."""


def require(section: Section, rules: Iterable[Rule], *, prefix: str = "") -> None:
    """Raise ConfigError for the first rule that is broken. `prefix` goes before its field, which is one of
    `section`."""
    for field, *shown, broken, remedy in rules:
        if broken:
            value = shown[0] if shown else value_of(section, field)
            raise ConfigError(f"{prefix}{field}", value, remedy)


def value_of(section: Any, field: str) -> Any:
    """Return the value of a field of a section, with dots; of an algorithm its name."""
    for name in field.split("."):
        section = section.get(name) if isinstance(section, dict) else getattr(section, name)
    return section.name if isinstance(section, Choice) else section
