"""A user's own file of settings: asyncrl-train --config my_run.yaml, and the JSON schema of such files.

A file holds what the command line may hold: options of groups by name, and fields, nested or with dots. It becomes
arguments, which a job, a sweep and a resumed run then keep like any others; those of the command line win.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl import CONF
from asyncrl.errors import CompositionError
from asyncrl.launch import help

FLAG = "--config"


def with_own_file(words: Sequence[str]) -> list[str]:
    """Return the command line with the settings of the file in place of --config FILE. Raises CompositionError."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{FLAG}=") else [word])]
    if FLAG not in words:
        return words
    place = words.index(FLAG)
    file, rest = words[place + 1 : place + 2], words[:place] + words[place + 2 :]
    if not file or FLAG in rest:
        raise CompositionError(f"{FLAG} takes the path of one YAML file: {FLAG} my_run.yaml.")
    given = {_name(word) for word in rest}
    return [word for word in arguments(Path(file[0])) if _name(word) not in given] + rest


def arguments(file: Path) -> list[str]:
    """Return the settings of a file as arguments. Raises CompositionError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file.expanduser()), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise CompositionError(f"{FLAG} {file}: it is no YAML: {error}") from None
    except (OSError, ValueError) as error:
        raise CompositionError(f"{FLAG} {file}: it cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CompositionError(f"{FLAG} {file}: it must hold settings as `name: value`.")
    if "defaults" in values:
        remedy = "name options of groups as settings: `model: tiny` instead of `override /model: tiny`"
        raise CompositionError(f"{FLAG} {file}: it has a list of defaults, as files of conf/ do; {remedy}.")
    return list(_words(values, help.group_options(CONF)))


def _words(values: Mapping[str, Any], groups: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}".lstrip("+")
        if (name in groups and isinstance(value, str)) or "@" in name:
            yield f"{prefix}{key}={value}"
        elif isinstance(value, dict) and value and name not in help.ALGORITHMS:
            yield from _words(value, groups, f"{name}.")
        elif name in help.ALGORITHMS:
            yield f"{name}={_written(value)}"
        elif value != {}:
            yield f"++{name}={_written(value)}"


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _written(value: Any) -> str:
    """Return a value in the grammar of Hydra's arguments."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def print_schema(words: Sequence[str]) -> None:
    """Print the JSON schema of such files, for editors."""
    print(schema())


def schema() -> str:
    """Return the JSON schema of such files, with the meaning of each field."""
    from pydantic import TypeAdapter

    from asyncrl import lookup
    from asyncrl.config import Config

    whole: dict[str, Any] = TypeAdapter(Config).json_schema(by_alias=True)
    properties, kinds = whole["properties"], whole["$defs"]
    for name, kept in lookup.sections(lookup.classes({})).items():
        own = kept.model_json_schema(ref_template="#/$defs/{model}")
        kinds.update(own.pop("$defs", {}))
        properties[name] = own
    for one in (whole, *kinds.values(), *properties.values()):
        one.pop("required", None)  # a file names what differs from the defaults
    for field in (field for section in help.sections() for field in section.fields):
        section, name = _section(whole, field.name)
        kind = section["properties"][name]
        if algorithms := list(help.algorithms(field.name)):
            path = {"type": "string", "pattern": ":"}
            kind = {"anyOf": [{"enum": algorithms}, path, *kind.get("anyOf", [kind])]}
        properties[field.name] = section["properties"][name] = {**kind, "description": field.meaning}
    for group, options in help.group_options(CONF).items():
        names = {"enum": options, "description": f"An option of the group {group}."}
        properties[group] = {"anyOf": [names, properties[group]]} if group in properties else names
    rest = {"patternProperties": {"^[+]|@": {}}, "additionalProperties": False}
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, **rest}, indent=1)


def _section(whole: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """Return the schema of the section that holds a field, and the field's name in it."""
    section, (*names, last) = whole, field.split(".")
    for name in names:
        section = section["properties"][name]
        if "$ref" in section:
            section = whole["$defs"][section["$ref"].rpartition("/")[2]]
    return section, last
