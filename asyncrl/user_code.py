"""Loading of a user's functions and classes by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError, described
from asyncrl.removed import moved

_announced: ContextVar[list[object] | None] = ContextVar("announced", default=None)


def load(path: str, field: str) -> Any:
    """Return the object at an import path, module:name. Raises ConfigError for the field that named it."""
    module, _, name = path.partition(":")
    if new := moved(module):
        raise ConfigError(field, path, f"The module moved: set {new}:{name}.")
    if not module or not name:
        raise ConfigError(field, path, "Must be an import path, module:name.")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = f"{error}: it must lie in {Path.cwd()}, from which the run starts, on PYTHONPATH, or be installed."
            raise ConfigError(field, path, f"Must be an import path, module:name. {remedy}") from None
        remedy = f"The import of {module} raised {described(error)}. Fix the module so that it can be imported."
        raise ConfigError(field, path, remedy) from error
    if not hasattr(found, name):
        raise ConfigError(field, path, f"Must be an import path, module:name. {found.__name__} has no {name}.")
    return getattr(found, name)


def can_import(package: str) -> bool:
    """Return whether a package can be imported, without importing more than its parents."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_arguments(
    function: Callable[..., Any], params: Mapping[str, Any], field: str, path: str, *given: Any, **more: Any
) -> None:
    """Raise ConfigError for `field` if a user's class or function does not accept these params.

    `given` and `more` are the arguments that it gets in any case.
    """
    try:
        inspect.signature(function).bind(*given, **more, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(field, dict(params), f"{path} rejects them: {error}.") from None


def made(kind: Callable[..., Any], params: Mapping[str, Any], field: str, path: str) -> Any:
    """Call a user's class or factory. Raises ConfigError when it raises anything but an AsyncRLError."""
    try:
        return kind(**params)
    except AsyncRLError:
        raise
    except (Exception, SystemExit) as error:
        remedy = f"Creating it with {dict(params)!r} raised {described(error)}."
        raise ConfigError(field, path, remedy) from error


@contextmanager
def announced() -> Iterator[list[object]]:
    """Collect what tasks, rewards and agents announce while they are built in this context."""
    found: list[object] = []
    token = _announced.set(found)
    try:
        yield found
    finally:
        _announced.reset(token)


def announce(part: object) -> None:
    """Tell the launcher about a part of a task, reward or agent that the preflight of an extension has to see: it is
    then in Preparation.announced. In other processes this does nothing."""
    if (found := _announced.get()) is not None:
        found.append(part)
