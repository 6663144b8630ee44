"""Composition of the settings with Hydra, from conf/, the recipes and the command line to plain values."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from asyncrl import CONF
from asyncrl.errors import CompositionError, ConfigError
from asyncrl.launch import help
from asyncrl.removed import removal

if TYPE_CHECKING:
    from asyncrl.config import Config


class FurtherConfs(SearchPathPlugin):
    """Hydra plugin that adds the conf/ folder of every extension and recipe to the search path, behind asyncrl's own.
    The setting hydra.searchpath stays the user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders."""
        for conf in help.further_confs():
            search_path.append("asyncrl", f"file://{conf}")


def find_further_confs() -> None:
    """Make Hydra find what extensions and recipes add to the groups of conf/."""
    Plugins.instance().register(FurtherConfs)


@dataclass(frozen=True)
class Composed:
    """The settings of one run, not yet validated."""

    values: dict[str, Any]
    overrides: list[str]
    """The arguments of the command line that apply to this run."""


def compose(conf: Path) -> list[Composed]:
    """Return the settings of every run that sys.argv asks for: several under --multirun, none when Hydra has only
    printed something (--cfg, completion), or an extension has. Raises CompositionError for what Hydra refuses."""
    words = with_flags_replaced(sys.argv[1:])
    if words is None:
        return []
    sys.argv[1:] = algorithm_overrides(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, and CompositionError adds field and remedy
    find_further_confs()
    composed: list[tuple[DictConfig, list[str]]] = []

    def keep(one: DictConfig) -> None:
        arguments: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        composed.append((one, arguments))

    try:
        hydra.main(version_base=None, config_path=str(conf), config_name="train")(keep)()
        return [Composed(plain(one), overrides) for one, overrides in composed]
    except OverrideParseException as error:
        field, given, text = error.override.partition("=")
        remedy = f"A text needs quotes: {shlex.quote(argument(field, text))}" if given else "Write FIELD=VALUE."
        raise CompositionError(f"{error.override}: Hydra cannot read it. {remedy}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise CompositionError(f"{str(error).strip().splitlines()[0].rstrip('.')}. {_spelling(str(error))}") from None


def argument(field: str, text: str) -> str:
    """Return the argument that sets a field to this text, in quotes unless it is a plain path."""
    plain = re.fullmatch(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_/.-]*", text)
    return f"{field}={text if plain else QuotedString(text, Quote.double).with_quotes()}"


def with_flags_replaced(words: list[str]) -> list[str] | None:
    """Return the command line with what extensions make of their flags (Extension.flags); None if one of them has done
    all that was asked for. Raises CompositionError."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if unknown := [flag for flag in flags if flag not in get_args_parser()._option_string_actions]:
        from asyncrl import lookup, user_code  # import pydantic, so only for flags that are not Hydra's

        offered = lookup.offered("flags")
        for flag in [flag for flag in unknown if flag in offered]:
            replaced: list[str] | None = user_code.load(offered[flag], flag)(words)
            if replaced is None:
                return None
            words = replaced
    return words


def defaults() -> dict[str, Any]:
    """Return the settings that no argument changes."""
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONF)):
        composed = hydra.compose("train")
    found: Any = OmegaConf.to_container(composed, resolve=True)
    return found


def load(composed: Sequence[Composed]) -> list[tuple[Config, list[str]]]:
    """Validate the settings of each run, and return them with its arguments. Raises ConfigError."""
    from asyncrl import config, lookup  # import pydantic, so only when there are settings to validate

    found = []
    for one in composed:
        values = one.values
        for kind in lookup.classes(values.get("extensions") or {}).values():
            values = kind.composed(values, one.overrides, defaults)
        found.append((config.load(values), one.overrides))
    return found


def algorithm_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line with algorithms, their settings and those of extensions as Hydra accepts them.

    The settings of an algorithm or an extension stand in no YAML file (their defaults are those of a function or a
    class), so Hydra would refuse them without `++`. A name replaces the algorithm with all of its settings.
    """
    found, extensions = list[str](), help.extensions()
    for word in words:
        name, given, value = word.partition("=")
        section, field, _ = name.partition(".")  # without a field, it is a group
        if given and name in help.ALGORITHMS and value != "null":
            found += [f"~{name}", f"+{name}={value}" if value.startswith("{") else f"++{name}.name={value}"]
        elif given and (name.lstrip("+").rpartition(".")[0] in help.ALGORITHMS or (field and section in extensions)):
            found.append(f"++{name.lstrip('+')}={value}")
        else:
            found.append(word)
    return found


def plain(composed: DictConfig) -> dict[str, Any]:
    """Return the settings as plain values. In free-form parameters, values from the environment remain references
    (config/secret_values.py)."""
    for name, resolver in (("oc.env", _marked_env), ("oc.decode", _decoded)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    from asyncrl import lookup  # imports pydantic, so only when there are settings to validate
    from asyncrl.config.secret_values import FREE, free_fields

    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    sections = lookup.sections(lookup.classes(values.get("extensions") or {}))
    values = _referred(values, {*FREE, *free_fields(sections.values())})
    check_resume(values, composed)
    return values


# -- values from the environment ---------------------------------------------------------------------------
# Once OmegaConf has resolved a variable, its value is indistinguishable from other text. The resolver therefore marks
# it. In free-form parameters a reference then replaces the marked text (config/secret_values.py), elsewhere the value
# does.

_BEGIN, _MIDDLE, _END = "\ue000", "\ue001", "\ue002"  # private-use characters, which no setting contains
_MARKED = re.compile(f"{_BEGIN}([^{_MIDDLE}]*){_MIDDLE}([^{_END}]*){_END}")


def _marked_env(name: str, *default: Any) -> Any:
    if name not in os.environ:
        return oc.env(name, *default)
    return f"{_BEGIN}{name}{_MIDDLE}{os.environ[name]}{_END}"


def _decoded(text: Any, *, _parent_: Any, _node_: Any) -> Any:
    return oc.decode(_plain(text) if isinstance(text, str) else text, _parent_, _node_)


def _plain(text: str) -> str:
    return _MARKED.sub(lambda found: found[2], text)


def _referred(value: Any, free: Collection[str], *, parameters: bool = False) -> Any:
    """Replace marked text by references in free-form parameters, which are the fields of these names, and by the values
    elsewhere."""
    from asyncrl.config.secret_values import REFERENCE

    if isinstance(value, dict):
        return {name: _referred(item, free, parameters=parameters or name in free) for name, item in value.items()}
    if isinstance(value, list):
        return [_referred(item, free, parameters=parameters) for item in value]
    if not isinstance(value, str) or not (found := _MARKED.search(value)):
        return value
    if not parameters:
        return _plain(value)
    if found[0] == value:
        return {REFERENCE: found[1]}
    return {REFERENCE: _MARKED.sub(lambda one: f"${{{one[1]}}}", value.replace("$", "$$"))}


def check_resume(values: dict[str, Any], composed: DictConfig) -> None:
    """Refuse resume=auto with a run folder named after the current time: the same command would never find it again."""
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    if values.get("resume") == "auto" and "${now:" in str(unresolved["run"]["dir"]):
        remedy = "run.dir is a new folder each time: set run.dir=FOLDER, so that the same command finds it again."
        raise ConfigError("resume", "auto", remedy)


LISTED = "asyncrl-train --help all lists every field and group."


def _spelling(message: str) -> str:
    """Return why the field that Hydra did not find was removed, or the option or field that is most similar."""
    if choice := re.search(r"Could not find '([\w/]+)/([\w.-]+)'", message):
        group, option = choice[1], choice[2]
        files = (file for conf in (CONF, *help.further_confs()) for file in conf.glob(f"{group}/*.yaml"))
        near = [f"{group}={one}" for one in difflib.get_close_matches(option, [file.stem for file in files], n=1)]
    else:
        quoted = re.search(r"'([\w.]+)'", message)
        if quoted and (removed := removal(quoted[1])):
            return removed
        near = _nearest(quoted[1]) if quoted else []
        if quoted and not near:
            own = "A setting of an extension of yours begins with +. "
            return f"{own}docs/coming_from.md says what settings of verl, slime and TRL are here. {LISTED}"
    return (f"Did you mean {near[0]}? " if near else "") + LISTED


def _nearest(name: str) -> list[str]:
    """Return the field whose name is most similar: one with the same last word in the same section (of several, one
    that people set first), or elsewhere if there is only one, before one that is spelt alike."""
    section, last = name.partition(".")[0], name.rpartition(".")[2]
    same = [field for field in help.field_names() if field.rpartition(".")[2] == last]
    here = [field for field in same if field.partition(".")[0] == section]
    found = sorted(here, key=lambda field: field not in help.FIRST) or (same if len(same) == 1 else [])
    return found[:1] or difflib.get_close_matches(name, help.field_names(), n=1)
