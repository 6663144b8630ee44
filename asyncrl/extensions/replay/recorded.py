"""Settings and checks of mode=replay: what is taken from the recorded run, whether there is a recording, and whether
the model has its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from asyncrl import lookup
from asyncrl.config import Config, under_new_names
from asyncrl.errors import ConfigError, RecordError
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.replay.extension import ReplaySettings
from asyncrl.launch.checks.model_files import check_same_tokens
from asyncrl.launch.resume import OTHER_ANYWAY
from asyncrl.models import catalog
from asyncrl.settings import Choice, Section

ITS_OWN = tuple(name for name in OTHER_ANYWAY if name != "engine")
"""Settings that a replay does not take from the recorded run. The engines' are taken, because others depend on them."""


def settings(
    composed: dict[str, Any], arguments: Sequence[str], defaults: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the settings of a replay: the recorded run's, except for what the command line sets: by name, by the
    choice of a group, or by an experiment that differs from `defaults`, which returns what is composed without
    arguments. Raises ConfigError if the recorded run's config.json cannot be read."""
    source = composed.get("replay", {}).get("from")
    if not isinstance(source, str):
        return composed  # it will be refused
    file = Path(source).expanduser() / "config.json"
    if not file.is_file():  # a recording of another program
        return composed
    try:
        recorded = json.loads(file.read_text())
        if not isinstance(recorded, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError) as error:
        raise ConfigError("replay.from", source, f"{file} cannot be read ({error}): restore it or delete it.") from None
    apart = lookup.apart(composed.get("extensions") or {})
    taken = {name: value for name, value in under_new_names(recorded).items() if name not in apart}
    return _merged(Config, composed, taken, defaults(), {*ITS_OWN, *_set_by(arguments)}, "")


def _set_by(arguments: Sequence[str]) -> set[str]:
    """Return the settings and sections that a command line names. `task@tasks.NAME=OPTION` names tasks.NAME, and
    `algo=OPTION` the whole section."""
    names = (word.lstrip("+~").partition("=")[0] for word in arguments)
    return {name.rpartition("@")[2] for name in names}


def _merged(
    section: type[Section],
    composed: dict[str, Any],
    recorded: dict[str, Any],
    defaults: dict[str, Any],
    keep: Collection[str],
    prefix: str,
) -> dict[str, Any]:
    """Return the recorded settings of a section, and the composed ones of what is in `keep`, differs from the defaults
    or was not recorded."""
    found = dict(recorded)  # a setting that no longer exists is refused when the settings are validated
    for attribute, field in section.model_fields.items():
        key = field.alias or attribute
        name, kind, value = f"{prefix}{key}", field.annotation, composed.get(key)
        named = any(name == one or name.startswith(f"{one}.") for one in keep)
        below = [one.removeprefix(f"{name}.").split(".") for one in keep if one.startswith(f"{name}.")]
        if named or key not in recorded:
            found[key] = value
        elif isinstance(kind, type) and issubclass(kind, Section) and not issubclass(kind, Choice):
            found[key] = _merged(kind, value or {}, recorded[key], defaults.get(key) or {}, keep, f"{name}.")
        elif below and isinstance(value, dict) and isinstance(recorded[key], dict):
            found[key] = json.loads(json.dumps(recorded[key]))
            for path in below:
                _copy(value, found[key], path)
        elif below or value != defaults.get(key):
            found[key] = value
    for key in composed.keys() - {field.alias or attribute for attribute, field in section.model_fields.items()}:
        named = any(one == f"{prefix}{key}" or one.startswith(f"{prefix}{key}.") for one in keep)
        if named or key not in recorded:
            found[key] = composed[key]  # the section of an extension, as a whole
    return {key: value for key, value in found.items() if key in composed or key in recorded}


def _copy(source: dict[str, Any], into: dict[str, Any], path: list[str]) -> None:
    """Copy what stands at this path, or remove it if there is nothing."""
    *above, last = path
    for name in above:
        if not isinstance(into.get(name), dict):
            into[name] = {}
        source, into = source.get(name) or {}, into[name]
    if last in source:
        into[last] = source[last]
    else:
        into.pop(last, None)


def check_recording(replay: ReplaySettings, *, replays: bool) -> None:
    """Refuse a folder without a recording and, of a run that `replays` it, one without the batches. Raises
    ConfigError."""
    for field, named in (("from", replay.source), ("compare", replay.compare)):
        folder = Path(named).expanduser() if named else None
        if folder and not (folder / "records").is_dir() and not list(folder.glob("*.frames")):
            remedy = "This folder has no recording: choose the folder of a run with record=true."
            raise ConfigError(f"replay.{field}", named, remedy)
    if not replays:
        return
    try:
        steps = Recording(replay.folder).steps
    except RecordError as error:
        raise ConfigError("replay.from", replay.source, f"Its recording cannot be read: {error}.") from None
    if not steps:
        raise ConfigError("replay.from", replay.source, "Its recording holds no batch: choose another run.")
    for field, step in (("first", replay.first), ("last", replay.last)):
        if step is not None and step not in steps:
            remedy = f"The recording holds batches {steps[0]} to {steps[-1]}."
            raise ConfigError(f"replay.{field}", step, remedy)


def check_vocabulary(replay: ReplaySettings, named: str, model: Path, hf: dict[str, Any]) -> None:
    """Refuse to train a recording of another vocabulary. `named` is model.path, `model` its folder, and `hf` its
    config.json. If the recorded run's model is no longer there, the ids of the first batch are compared with the size
    of the vocabulary. Raises ConfigError."""
    file = replay.folder / "config.json"
    recorded = json.loads(file.read_text())["model"]["path"] if file.is_file() else None
    try:
        before = catalog.resolve(recorded) if recorded else None
    except ConfigError:  # it was moved or deleted
        before = None
    if before == model:
        return
    remedy = "use the model that the batches were recorded with, or one of its family"
    if before and (before / "tokenizer.json").is_file():
        check_same_tokens("model.path", named, before, model, remedy)
    recording = Recording(replay.folder)
    size, groups = int(hf["vocab_size"]), recording.batch(recording.steps[0]).groups
    turns = [turn for group in groups for one in group.trajectories for turn in one.turns]
    ids = [
        *(group.prompt_ids for group in groups),
        *(one for t in turns for one in (t.observation, t.completion.token_ids)),
    ]
    largest = max((max(some) for some in ids if some), default=0)
    if largest >= size:
        text = f"{replay.source} has token {largest}, but this model's vocabulary has {size} tokens: {remedy}."
        raise ConfigError("model.path", named, text)
