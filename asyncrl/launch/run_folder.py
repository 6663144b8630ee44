"""The run folder: it is its owner's alone, known by a mark of ours, and emptied only when that is asked for.

Whatever a run or its user reads must not lie in a folder that is emptied, and a `config.json` says nothing: every model
folder has one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import resume

MARK = ".asyncrl-run"
AT_ONCE = {"logs", "slurm", resume.LOCK, MARK}
"""What a launcher makes first: one that was killed at once leaves these alone."""
OUTPUTS = ("run.dir", "weights.folder")
"""Settings that name what a run writes."""


def is_run(folder: Path) -> bool:
    """Whether a run has begun in it."""
    return (folder / MARK).is_file()


def prepare(config: Config, run_dir: Path) -> None:
    """A run never writes into another's folder, and never empties one that is not a run's, or holds what it reads."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("run.dir", str(run_dir), "This is a file: name a folder.")
    if not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= AT_ONCE:
        return
    if not config.run.overwrite:
        raise ConfigError(
            "run.dir", str(run_dir), "The folder is not empty: choose another, or set run.overwrite=true."
        )
    if not is_run(run_dir):
        remedy = f"{run_dir} has no {MARK}, and so is no run's: empty it yourself if that is meant."
        raise ConfigError("run.overwrite", True, remedy)
    _check_apart(config, run_dir)
    os.close(resume.lock(run_dir))  # a run may be at work in it
    shutil.rmtree(run_dir)


def take(run_dir: Path) -> None:
    """Make it, mark it, and close it to everybody else. Raises ConfigError where it is another user's."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    try:
        run_dir.chmod(0o700)
    except PermissionError:
        raise ConfigError("run.dir", str(run_dir), "The folder is another user's: choose one of your own.") from None
    (run_dir / MARK).touch()


def _check_apart(config: Config, run_dir: Path) -> None:
    here = run_dir.resolve()
    for field, text in _texts(config.model_dump()):
        path = Path(text).expanduser().resolve() if "\0" not in text else Path("/")
        if field not in OUTPUTS and here in (path, *path.parents) and path.exists():
            remedy = "It lies in run.dir, which run.overwrite=true would empty: move it, or choose another run.dir."
            raise ConfigError(field, text, remedy)


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, field)
    elif isinstance(value, str):
        yield field, value
