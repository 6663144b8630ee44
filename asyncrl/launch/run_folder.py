"""The run folder: private to its owner, identified by a marker file, and emptied only on request.

Inputs of a run must not lie in a folder that is emptied. A `config.json` does not identify a run folder, since every
model folder has one.

The launcher also looks for full disks after a failure, because the process that could not write often could not log
the reason either.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl import jsonl
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError, Paused, Stopped
from asyncrl.launch import resume
from asyncrl.network.addresses import END, OVERRIDES

MARK = ".asyncrl-run"
AT_ONCE = {"logs", "slurm", resume.LOCK, MARK}
"""What a launcher creates first; a launcher killed early leaves nothing else."""
OUTPUTS = ("run.dir", "weights.folder")
"""Settings that name outputs of a run."""


def is_run(folder: Path) -> bool:
    """Return whether a run has started in the folder."""
    return (folder / MARK).is_file()


def prepare(config: Config, run_dir: Path) -> None:
    """Check that the run may use this folder, and empty it if run.overwrite is set. A folder is never emptied if it is
    not a run's, if a run is in progress there, or if it holds inputs of this run. Raises ConfigError."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("run.dir", str(run_dir), "This is a file: choose a folder.")
    if not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= AT_ONCE:
        return
    if not config.run.overwrite:
        raise ConfigError(
            "run.dir", str(run_dir), "The folder is not empty: choose another, or set run.overwrite=true."
        )
    if not is_run(run_dir):
        remedy = f"{run_dir} has no {MARK}, so it is not a run folder: to use it anyway, empty it yourself."
        raise ConfigError("run.overwrite", True, remedy)
    _check_apart(config, run_dir)
    os.close(resume.lock(run_dir))  # a run may be in progress there
    shutil.rmtree(run_dir)


def take(run_dir: Path) -> None:
    """Create the folder, mark it, and make it private. Raises ConfigError if it belongs to another user."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    try:
        run_dir.chmod(0o700)
    except PermissionError:
        raise ConfigError(
            "run.dir", str(run_dir), "The folder belongs to another user: choose one of your own."
        ) from None
    (run_dir / MARK).touch()


def record_overrides(config: Config, run_dir: Path, arguments: Sequence[str]) -> None:
    """Write overrides.json. It names the settings without their values, which may be secret."""
    pairs = [word.lstrip("+").partition("=") for word in arguments if "=" in word]
    scalars = {name for name, value in config.model_dump(by_alias=True).items() if not isinstance(value, dict)}
    names = [
        name if name in scalars or "." in name.partition("@")[0] or value.startswith("{") else f"{name}={value}"
        for name, _, value in pairs
    ]
    jsonl.replace(run_dir / OVERRIDES, {"names": list(dict.fromkeys(names))})


def record_end(run_dir: Path, error: BaseException) -> None:
    """Write end.json, for those who read the files of a run that did not finish."""
    state = "paused" if isinstance(error, Paused) else "stopped" if isinstance(error, Stopped) else "died"
    text = str(error) if isinstance(error, AsyncRLError | Paused) else f"{type(error).__name__}: {error}"
    text = f"stopped by {error}" if isinstance(error, Stopped) else text
    with suppress(OSError):  # the disk may be full, which must not hide the error on the console
        jsonl.replace(run_dir / END, {"state": state, "error": text, "time": time.time()})


def _check_apart(config: Config, run_dir: Path) -> None:
    here = run_dir.resolve()
    for field, text in _texts(config.model_dump()):
        path = Path(text).expanduser().resolve() if "\0" not in text else Path("/")
        if field not in OUTPUTS and here in (path, *path.parents) and path.exists():
            remedy = "It is inside run.dir, which run.overwrite=true would empty: move it, or choose another run.dir."
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


ERRORS = (errno.ENOSPC, errno.EDQUOT)
PROBE = 64 << 10
"""Bytes written to test a folder."""


def full(folders: Iterable[Path]) -> list[str]:
    """Return one line for each of these folders where writing fails for lack of space or quota."""
    found = []
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in ERRORS:
                found.append(
                    f"{os.strerror(error.errno)}: {folder}. Free some space there; files that were written are kept."
                )
    return found
