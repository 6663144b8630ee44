"""The run folder: private to its owner, identified by a marker file, and emptied only on request.

Inputs of a run must not lie in a folder that is emptied. A `config.json` does not identify a run folder, since every
model folder has one.

The launcher also looks for full disks and removed folders after a failure, because the process that could not write
often could not log the reason either.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
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
from asyncrl.launch.leftovers import SHARED
from asyncrl.network.addresses import END, OVERRIDES

MARK = ".asyncrl-run"
AT_ONCE = {"logs", resume.LOCK, MARK}
"""What a launcher creates first; a launcher killed early leaves nothing else. A cluster keeps what belongs to its job
in a folder of its name."""
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
    if not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= AT_ONCE | {config.cluster.launcher}:
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
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o700)
    except PermissionError:
        raise ConfigError(
            "run.dir", str(run_dir), "The folder belongs to another user: choose one of your own."
        ) from None
    except OSError as error:
        if error.errno in ERRORS:
            raise  # `explained` names all full disks
        remedy = f"It cannot be written ({error.strerror}: {error.filename}): {WRITABLE}."
        raise ConfigError("run.dir", str(run_dir), remedy) from None
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
WRITABLE = "choose a folder that you may write to"
REMEDIES = {
    **dict.fromkeys(ERRORS, "Free some space there; files that were written are kept."),
    errno.ENOENT: "It was removed or moved during the run: choose a folder that stays.",
    errno.EROFS: f"Mount it for writing, or {WRITABLE}.",
    errno.EACCES: f"Change its permissions, or {WRITABLE}.",
}
"""What to do about a folder where writing fails."""
SHARED_REMEDY = "enlarge it (mount -o remount,size=16g /dev/shm; docker run --shm-size=16g)"
SHARED_ENOUGH = 16 << 30
"""Free bytes with which the remedy, which gives as many, would not help."""
PROBE = 64 << 10
"""Bytes written to test a folder."""


def full(folders: Iterable[Path]) -> list[str]:
    """Return one line for each of these folders where writing fails: for lack of space or quota, or because it has been
    removed or may not be written."""
    found = []
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in REMEDIES:
                found.append(f"{os.strerror(error.errno)}: {folder}. {REMEDIES[error.errno]}")
    return found


def explained(error: OSError, run_dir: Path) -> str | None:
    """Return what ended a run: this error, and the folders where writing fails; None if writing works everywhere, so
    that the error has another cause."""
    lacks_space = error.errno in ERRORS
    if not lacks_space and not str(error.filename).startswith(f"{run_dir}/"):
        return None
    lines = full([run_dir, Path(tempfile.gettempdir())] if run_dir.exists() or not lacks_space else [run_dir.parent])
    return "\n".join([f"the run has ended: {error}", *lines]) if lines or lacks_space else None


def shared_memory(code: int, told: str, run_dir: Path) -> list[str]:
    """Return a line about /dev/shm if a process that ended so, and told this, may have found too little room there: not
    if it names the run's folder, or what the remedy would give is free. Once it has ended, there may be room again."""
    lacking = [line for line in told.splitlines() if os.strerror(errno.ENOSPC) in line]
    if code != -signal.SIGBUS and (not lacking or any(str(run_dir) in line for line in lacking)):
        return []
    size = shutil.disk_usage(SHARED)
    room = f"{SHARED} has {size.free / 1e6:.0f} MB free of {size.total / 1e6:.0f} MB"
    text = f"{room}, which may be too little for what processes share: {SHARED_REMEDY}."
    return [text] if size.free < SHARED_ENOUGH else []
