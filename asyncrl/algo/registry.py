"""Losses, advantage estimators and corrections by name.

An algorithm is a function. Its keyword-only parameters are its settings: their annotations state the limits, their
default values are the defaults. A user's own function is given by its import path, module:name.

The modules of the built-in algorithms call methods of tensors and import torch for type checking only. The launcher can
therefore check settings without importing torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError, create_model

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.settings import Choice, Section
from asyncrl.user_code import load

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., "Tensor"]
F = TypeVar("F", bound=Function)
T = TypeVar("T")


@dataclass(frozen=True)
class Algorithm(Generic[T]):
    """A function with its settings."""

    function: Function
    traits: T
    settings: Mapping[str, Any]

    def __call__(self, *arguments: Any) -> Tensor:
        """Call the function."""
        return self.call(self.function, *arguments)

    def call(self, function: Function, *arguments: Any) -> Tensor:
        """Call this function, or another one that belongs to the algorithm, with the settings that it has. Raises
        AsyncRLError if it does not return a tensor with a value for each token of the last argument."""
        found = function(*arguments, **{name: self.settings[name] for name in _settings_of(function)})
        shape, tokens = getattr(found, "shape", type(found)), arguments[-1].behaviour.shape
        if shape != tokens:
            name = f"{function.__module__}:{function.__qualname__}"
            raise AsyncRLError(
                f"{name} must return a tensor with a value for each token, {tokens}, and returned {shape}"
            )
        return found


class AlgorithmRegistry(Generic[T]):
    """The algorithms of one field of the configuration, each with its traits: what limits its use."""

    def __init__(
        self,
        field: str,
        plain: T,
        parts: Callable[[T], list[Function]] = lambda _: [],
        offered: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Create an empty registry. `plain` are the traits of a function that states none; `parts` returns further
        functions whose settings belong to the algorithm, and `offered` the import paths of those of extensions."""
        self._field = field
        self._plain = plain
        self._parts = parts
        self._offered = offered
        self._functions: dict[str, Function] = {}
        self._traits: dict[Function, T] = {}

    def register(self, traits: T | None = None) -> Callable[[F], F]:
        """Return a decorator that registers a function under its name. A user's own function only needs it to state
        traits."""

        def add(function: F) -> F:
            self._functions[function.__name__] = function
            self._traits[function] = traits or self._plain
            return function

        return add

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, also those of extensions."""
        return iter({**self._functions, **self._offered()})

    def __contains__(self, name: object) -> bool:
        """Return whether this is the name of an algorithm."""
        return name in set(self)

    def __len__(self) -> int:
        """Return the number of algorithms."""
        return sum(1 for _ in self)  # list(self) would ask for the length

    def traits(self, choice: Choice) -> T:
        """Return the traits of a choice; those of a user's own function are known only after `find`."""
        return self._plain if choice.is_own else self.find(choice).traits

    def completed(self, choice: Choice) -> Choice:
        """Return the choice with all of its settings. A user's own function is not imported; its settings stay as they
        are. Raises ConfigError for an unknown name or setting."""
        return choice if choice.is_own else Choice(name=choice.name, **self.find(choice).settings)

    def find(self, choice: Choice) -> Algorithm[T]:
        """Return the algorithm of a choice. Raises ConfigError for an unknown name or setting."""
        path = choice.name if choice.is_own else self._offered().get(choice.name)
        if path:
            function = load(path, self._field)
        elif choice.name in self._functions:
            function = self._functions[choice.name]
        else:
            remedy = f"Must be one of {', '.join(self)}, or an import path, module:name."
            raise ConfigError(self._field, choice.name, remedy)
        traits = self._traits.get(function, self._plain)
        return Algorithm(function, traits, self._checked(choice, [function, *self._parts(traits)]))

    def _checked(self, choice: Choice, functions: list[Function]) -> dict[str, Any]:
        model = _model(tuple(functions))
        try:
            return dict(model.model_validate(choice.settings))
        except ValidationError as error:
            problem = error.errors()[0]
            field, value = f"{self._field}.{problem['loc'][0]}", problem["input"]
            names = ", ".join(model.model_fields) or "none"
            remedies = {"extra_forbidden": f"{choice.name} has the settings {names}.", "missing": "Must be given."}
            raise ConfigError(field, value, remedies.get(problem["type"], problem["msg"] + ".")) from None


@cache
def _model(functions: tuple[Function, ...]) -> type[Section]:
    """Return the section that has the settings of these functions."""
    fields: Any = {name: kind for function in functions for name, kind in _settings_of(function).items()}
    return create_model("Settings", __base__=Section, __module__=functions[0].__module__, **fields)


def _settings_of(function: Function) -> dict[str, tuple[Any, Any]]:
    """Return type and default of each setting."""
    found = inspect.signature(function).parameters.values()
    return {
        one.name: (
            Any if one.annotation is one.empty else one.annotation,
            ... if one.default is one.empty else one.default,
        )
        for one in found
        if one.kind is one.KEYWORD_ONLY
    }
