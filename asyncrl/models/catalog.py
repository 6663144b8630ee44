"""Resolution of `model.path` to a Hugging Face folder: `builtin:NAME` is created once in a cache, any other must exist.

The writers import torch, which the launcher must not. A missing folder is therefore created by a separate process
(`python -m asyncrl.models`) in a temporary folder beside its final place, and then renamed: a folder that exists is
complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, DeadlineExceeded, ProcessDied
from asyncrl.lookup import offered
from asyncrl.models import tiny
from asyncrl.user_code import load

PREFIX = "builtin:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files of a model of the Hub that are downloaded."""
HUB_SECONDS = 10.0
WRITER_SECONDS = 600.0  # seconds: thirty times what the conversion takes on two cores


@dataclass(frozen=True)
class Builtin:
    """A model that asyncrl can create by itself."""

    write: Callable[[Path], None]
    """Writes the whole folder. Imports torch only when called."""
    version: int
    """Part of the folder's name. Increase it when the output of `write` changes; otherwise old caches stay in use."""
    about: str
    """What the writer does and how long it takes, for the line on stderr."""
    require: Callable[[], object] | None = None
    """A cheap check that runs in the caller, so that missing requirements are reported before a process is started."""


BUILTIN = {"tiny": Builtin(tiny.write, 1, "writing random weights, about 5 s")}


def builtin() -> dict[str, Builtin]:
    """Return all models that asyncrl or an extension can create, by name."""
    return {**BUILTIN, **{name: load(path, "model.path") for name, path in offered("builtin").items()}}


def cache_dir() -> Path:
    """Return the folder that holds created models: $ASYNCRL_CACHE, or $XDG_CACHE_HOME/asyncrl, or ~/.cache/asyncrl."""
    if own := os.environ.get("ASYNCRL_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "asyncrl"


def resolve(path: str, field: str = "model.path") -> Path:
    """Return the absolute HF folder that the setting `field` names, after creating a built-in model that is not in the
    cache. Raises ConfigError if there is none."""
    if path.startswith(PREFIX):
        return _resolve_builtin(path, field)
    folder = Path(path).expanduser().absolute()
    if not folder.exists() and HUB_NAME.fullmatch(path):
        return _download(path, field)
    if not (folder / "config.json").is_file():
        names = ", ".join(PREFIX + name for name in builtin())
        remedy = f"Give a folder with config.json (download a hub model into one first), or one of {names}."
        raise ConfigError(field, path, remedy)
    return folder


def _download(name: str, field: str) -> Path:
    """Return the folder of a model of the Hugging Face Hub in its cache, after downloading what is missing. Raises
    ConfigError with the command that does it where there is a network."""
    import httpx
    from huggingface_hub import snapshot_download  # takes 0.3 s to import

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, etag_timeout=HUB_SECONDS))
    except (OSError, ValueError, httpx.HTTPError) as error:
        remedy = (
            f"There is no such folder, and it cannot be downloaded from the Hugging Face Hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Run on a machine with a network: hf download {name} --local-dir "
            f"FOLDER, and set {field}=FOLDER."
        )
        raise ConfigError(field, name, remedy) from None


def _resolve_builtin(path: str, field: str) -> Path:
    name = path.removeprefix(PREFIX)
    if name not in builtin():
        raise ConfigError(field, path, f"The built-in models are {', '.join(builtin())}.")
    folder = cache_dir() / "models" / f"{name}-v{builtin()[name].version}"
    if not _complete(folder):
        _make(name, folder)
    return folder


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _make(name: str, folder: Path) -> None:
    """Create `folder` completely or not at all. Of two concurrent writers, the first to rename wins and both use its
    folder."""
    entry = builtin()[name]
    if entry.require is not None:
        entry.require()
    print(f"asyncrl: {PREFIX}{name} is not cached yet: {entry.about} -> {folder}", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Use a temporary folder beside the final place, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / "model"
        _run_writer(name, made)
        with contextlib.suppress(OSError):  # another writer was first: its folder is equivalent
            made.rename(folder)
    if not _complete(folder):
        remedy = f"{folder} is in the way and is not a model: delete it."
        raise ConfigError("model.path", PREFIX + name, remedy)


def _run_writer(name: str, out: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.models", name, str(out)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WRITER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"the writer of {PREFIX}{name}", WRITER_SECONDS, " ".join(command)) from None
    if done.returncode != 0:
        raise ProcessDied(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-2000:]}")
