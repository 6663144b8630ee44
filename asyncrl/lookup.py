"""Which extensions there are, and what they answer together.

An extension is found in a folder of asyncrl/extensions, by an installed package's entry point of the group
`asyncrl.extensions`, or by its import path in the setting `extensions`. Every process asks for itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, StepListener
from asyncrl.settings import Section
from asyncrl.user_code import load

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.placement import Placement

T = TypeVar("T")
GROUP = "asyncrl.extensions"
NOBODY = "No extension that is installed does this: leave it unset."
NAMED = "ASYNCRL_EXTENSIONS"
"""Environment variable with extensions that the setting names, for processes that read no configuration."""


@cache
def shipped() -> dict[str, str]:
    """Return the import paths of the extensions in asyncrl/extensions, by the name of their folder."""
    folders = sorted(file.parent.name for file in (Path(__file__).parent / "extensions").glob("*/extension.py"))
    return {name: f"{__package__}.extensions.{name}.extension:Own" for name in folders}


@cache
def installed() -> dict[str, str]:
    """Return the import paths of the extensions of installed packages, by name."""
    return {found.name: found.value for found in entry_points(group=GROUP)}


def classes(named: Mapping[str, str]) -> dict[str, type[Extension]]:
    """Return all extensions by name: those of asyncrl and of installed packages, and those that the setting names.
    Raises ConfigError."""
    if not (isinstance(named, Mapping) and all(isinstance(path, str) for path in named.values())):  # not validated yet
        raise ConfigError("extensions", named, "Must map names to import paths: +extensions.NAME=module:Class.")
    return dict(_classes(tuple({**shipped(), **installed(), **named}.items())))


@cache
def _classes(paths: tuple[tuple[str, str], ...]) -> dict[str, type[Extension]]:
    """Return the classes at these import paths. Every validation of settings asks for them several times."""
    found = {}
    for name, path in paths:
        found[name] = kind = load(path, f"extensions.{name}")
        if not (isinstance(kind, type) and issubclass(kind, Extension)):
            remedy = "Must be a subclass of asyncrl.extension.Extension."
            raise ConfigError(f"extensions.{name}", path, remedy)
    return found


def sections(kinds: Mapping[str, type[Extension]]) -> dict[str, type[Section]]:
    """Return the sections of the configuration that are those of extensions, by name."""
    found = dict[str, type[Section]]()
    for name, kind in kinds.items():
        found |= {name: kind.Settings} if kind.Settings is not Section else {}
        found |= kind.models
    return found


def active(config: Config) -> dict[str, Extension]:
    """Return a new instance of every extension, by name."""
    settings = config.model_extra or {}
    return {name: kind(settings.get(name, Section())) for name, kind in classes(config.extensions).items()}


def followed(config: Config) -> list[Path]:
    """Return the folders of the earlier runs that this one follows."""
    every = (one.launch().follows(config) for one in active(config).values())
    return [folder for folder in every if folder is not None]


def engine_arguments(config: Config, *, gpu: bool) -> dict[str, Any]:
    """Return the arguments that all extensions add to those of the policy's engines."""
    every = (one.engine().arguments(config, gpu=gpu) for one in active(config).values())
    return {name: value for arguments in every for name, value in arguments.items()}


def needs_weights(config: Config) -> bool:
    """Return whether the engines of some extension need the trainers' weights before the first step."""
    return any(one.engine().needs_weights(config) for one in active(config).values())


def keeps_versions(config: Config) -> bool:
    """Return whether the engines hold several versions at once."""
    return any(one.engine().keeps_versions(config) for one in active(config).values())


def step_listeners(
    config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None = None
) -> list[StepListener]:
    """Return what receives the steps of a run of all extensions."""
    found = (one.steps(config, run_dir, model, warn, first) for one in active(config).values())
    return [listener for listener in found if listener is not None]


def engine_environment(config: Config) -> dict[str, str]:
    """Return the environment in which an engine's process finds those extensions with hooks that the setting names."""
    kinds = classes(config.extensions)
    named = {name: path for name, path in config.extensions.items() if kinds[name].engine is not Extension.engine}
    return {NAMED: json.dumps(named)} if named else {}


def install_in_engine(argv: Sequence[str]) -> None:
    """Install the hooks of all extensions in an engine's process. Raises ConfigError."""
    for kind in classes(json.loads(os.environ.get(NAMED, "{}"))).values():
        kind(kind.Settings()).engine().install(argv)


def sweep() -> None:
    """Remove what killed runs have left on this machine of the extensions that need not be named."""
    for kind in classes({}).values():
        kind(kind.Settings()).launch().sweep()


def shared(config: Config, placement: Placement) -> dict[str, dict[str, str]]:
    """Return what the processes of each extension share: Addresses.extensions."""
    every = {name: one.launch().shared(placement.ports.get(name, [])) for name, one in active(config).items()}
    return {name: told for name, told in every.items() if told}


def offered(table: str, named: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what extensions offer in a table of their classes (tasks, rewards, advantages, ...), by
    name: those that need not be named, and with `named` also those that the setting names."""
    return {name: one for kind in classes(named or {}).values() for name, one in getattr(kind, table).items()}


@cache
def loaded(attribute: str) -> list[Any]:
    """Return the objects at the import paths that extensions offer in an attribute of their classes (question,
    hosting), of those that need not be named."""
    paths = (getattr(kind, attribute) for kind in classes({}).values())
    return [load(path, "extensions") for path in paths if path]


def enabled(named: Mapping[str, str]) -> set[str]:
    """Return the settings of the core that need an extension, and have one."""
    return {field for kind in classes(named).values() for field in kind.enables}


def apart(named: Mapping[str, str]) -> set[str]:
    """Return the names of the extensions whose settings cannot change what is trained."""
    return {name for name, kind in classes(named).items() if not kind.trains}


def wrapped(task: T, section: Any, field: str) -> T:
    """Return the task of a section that sets this field as an extension wraps it. Raises ConfigError if none does."""
    for kind in classes({}).values():
        if field in kind.wrappers:
            made: T = load(kind.wrappers[field], f"task.{field}")(task, section)
            return made
    raise ConfigError(f"task.{field}", getattr(section, field), NOBODY)
