"""Composition of the settings by Hydra: from conf/ and the command line to plain values."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.errors import CompositionError, ConfigError
from asyncrl.launch import reference


@dataclass(frozen=True)
class Composed:
    """The settings of one run, not yet validated."""

    values: dict[str, Any]
    overrides: list[str]
    """The arguments of the command line that apply to this run."""


def compose(conf: Path) -> list[Composed]:
    """Return the settings of every run that sys.argv asks for: several under --multirun, none when Hydra has only
    printed something (--cfg, completion). Raises CompositionError for what Hydra refuses."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, and CompositionError adds field and remedy
    composed: list[tuple[DictConfig, list[str]]] = []

    def keep(one: DictConfig) -> None:
        composed.append((one, list(HydraConfig.get().overrides.task)))

    try:
        hydra.main(version_base=None, config_path=str(conf), config_name="train")(keep)()
        return [Composed(_values(one), overrides) for one, overrides in composed]
    except (HydraException, OmegaConfBaseException) as error:
        raise CompositionError(f"{_first_line(error)}. {_spelling(str(error))}") from None


def _values(composed: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    check_resume(values, composed)
    return values


def check_resume(values: dict[str, Any], composed: DictConfig) -> None:
    """A folder that is named after the moment is another one when the command is given again."""
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    if values.get("resume") == "auto" and "${now:" in str(unresolved["run"]["dir"]):
        remedy = "run.dir is a new folder each time: set run.dir=FOLDER, which the same command finds again."
        raise ConfigError("resume", "auto", remedy)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _spelling(message: str) -> str:
    """The nearest field to the one that Hydra did not find, and where all are listed."""
    quoted = re.search(r"'([\w.]+)'", message)
    near = difflib.get_close_matches(quoted[1], reference.field_names(), n=1) if quoted else []
    return (f"Did you mean {near[0]}? " if near else "") + "asyncrl-train --help lists every field and group."
