"""Checks of mode=replay: whether there is a recording, and which settings differ from those of the recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError

OTHER_ANYWAY = (
    "mode",
    "record",
    "replay",
    "resume",
    "checkpoint",
    "run.dir",
    "run.name",
    "run.overwrite",
    "metrics",
    "cluster",
    "engine",
)
"""Settings that a replay does not read, or that have to differ."""


def check_recording(config: Config) -> None:
    """Refuse to replay what was not recorded. Raises ConfigError if there is no recording or batch, RecordError if the
    recording is damaged."""
    for field, named in (("from", config.replay.source), ("compare", config.replay.compare)):
        folder = Path(named).expanduser() if named else None
        if folder and not (folder / "records").is_dir() and not list(folder.glob("*.frames")):
            remedy = "This folder has no recording: choose the folder of a run with record=true."
            raise ConfigError(f"replay.{field}", named, remedy)
    if config.mode != "replay":
        return
    from asyncrl.records.reading import Recording  # imports pyarrow, which other runs' launchers do without

    steps = Recording(config.replay.folder).steps
    if not steps:
        raise ConfigError("replay.from", config.replay.source, "Its recording holds no batch: choose another run.")
    for field, step in (("first", config.replay.first), ("last", config.replay.last)):
        if step is not None and step not in steps:
            remedy = f"The recording holds batches {steps[0]} to {steps[-1]}."
            raise ConfigError(f"replay.{field}", step, remedy)


def differences(config: Config) -> list[str]:
    """Return a line "field: recorded -> now" for each different setting that matters to training. Empty if the recorded
    run's config.json is missing."""
    if config.mode != "replay" or not (file := config.replay.folder / "config.json").is_file():
        return []
    return differing(json.loads(file.read_text()), config)


def differing(before: dict[str, Any], config: Config) -> list[str]:
    """Return a line "field: before -> now" for each different setting that matters to training."""
    then, now = _flat(before), _flat(json.loads(config.model_dump_json()))
    return [
        f"{name}: {then.get(name)} -> {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name) and not _is_other_anyway(name)
    ]


def _is_other_anyway(name: str) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in OTHER_ANYWAY)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
