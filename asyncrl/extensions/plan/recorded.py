"""Settings and steps of a recorded run, of this version or an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl import CONF, config
from asyncrl.config import Config
from asyncrl.errors import RecordError
from asyncrl.jsonl import Tail

REQUIRED = "???"
"""Hydra's mark of a value that has no default."""


def read(run: Path) -> tuple[Config, list[dict[str, Any]]]:
    """Return the settings of a run and its complete steps. Settings that did not exist when it was made have the
    defaults of conf/. Raises RecordError if it is no run."""
    try:
        values = json.loads((run / "config.json").read_text())
        (run / "metrics.jsonl").stat()
        steps = Tail(run / "metrics.jsonl")()
    except (OSError, ValueError) as error:
        raise RecordError(f"{run} is not the folder of a run: {error}") from None
    return config.load(_completed(values)), steps


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the defaults of conf/ where they have none."""
    whole = _loaded(CONF / "train.yaml")
    groups = [one for one in whole.pop("defaults") if isinstance(one, dict)]
    whole.pop("hydra")
    for group in groups:
        for name, option in group.items():
            if (file := CONF / name / f"{option}.yaml").is_file() and name != "experiment":
                whole[name] = _loaded(file)
    task = _loaded(CONF / "task" / "base.yaml")
    whole["task"] = task
    found: dict[str, Any] = _filled(values, whole)
    for tasks in (found["tasks"], found["eval"]["sets"]):
        tasks |= {name: _filled(one, task) for name, one in tasks.items()}
    return found


def _filled(values: Any, defaults: Any) -> Any:
    """Return values with the missing fields of mappings."""
    if not isinstance(values, dict) or not isinstance(defaults, dict):
        return values
    missing = {name: one for name, one in defaults.items() if name not in values and one != REQUIRED}
    return {**missing, **{name: _filled(one, defaults.get(name)) for name, one in values.items()}}


def _loaded(file: Path) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found
