"""Output folders that get their final name only when they are complete, and the files beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.models.architectures import flat
from asyncrl.weights.export import WEIGHTS

MARKS = ("config.json", "metadata.json", "adapter_config.json")  # every converted folder has one of them
NOT_COPIED = (*WEIGHTS, "*.pth", "*.h5", "*.msgpack", "*.onnx", ".git", ".cache")


def check_output(source: Path, out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if the output folder exists, or contains or is inside the source."""
    here, there = source.resolve(), out.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ConfigError("OUT", str(out), f"It must be a folder outside of {source}.")
    if not out.exists():
        return
    if not overwrite:
        raise ConfigError("OUT", str(out), "It already exists: choose a new folder, or pass --overwrite.")
    if not out.is_dir() or (any(out.iterdir()) and not any((out / name).is_file() for name in MARKS)):
        raise ConfigError("OUT", str(out), "It is not a converted folder: --overwrite does not delete it.")


@contextmanager
def building(out: Path) -> Iterator[Path]:
    """Yield a folder to write into. It gets the name `out` when the block ends, and is removed if the block fails."""
    partial, replaced = (out.with_name(out.name + ending) for ending in (".partial", ".replaced"))
    if replaced.exists() and not out.exists():
        replaced.rename(out)  # a conversion was killed between its two renames
    for leftover in (partial, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        if partial.exists():
            shutil.rmtree(partial)
    if replaced.exists():
        shutil.rmtree(replaced)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise WeightsError if the disk of `folder` has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise WeightsError(f"{folder} needs {nbytes / 1e9:.2f} GB, but its disk has only {free / 1e9:.2f} GB left")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of an HF folder, as `flat`. Raises WeightsError if it is missing or is not JSON."""
    try:
        return flat(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder / 'config.json'} cannot be read: {error}") from None


def copy_companions(source: Path, target: Path, changes: dict[str, Any]) -> None:
    """Copy the config (with `changes`), the tokenizer and everything else but weights. Without changes config.json
    keeps its bytes, but for the mark of quantized weights, which are written in bfloat16. Raises WeightsError for a
    link out of the folder: its target could be any file of the user.

    Modes are not copied, because a source may be read-only.
    """
    _copy_companions(source, target, _roots(source))
    hf = json.loads((target / "config.json").read_text())
    if changes or "quantization_config" in hf:
        hf.pop("quantization_config", None)
        if "dtype" in changes:
            hf.pop("torch_dtype", None)  # the name before transformers 5
        (target / "config.json").write_text(json.dumps({**hf, **changes}, indent=2) + "\n")


def _roots(source: Path) -> tuple[Path, ...]:
    """Return the folders into which links of `source` may lead: itself, and the blobs of Hugging Face's cache."""
    here = source.resolve()
    return (here, here.parent.parent / "blobs") if here.parent.name == "snapshots" else (here,)


def _copy_companions(source: Path, target: Path, roots: tuple[Path, ...]) -> None:
    target.mkdir(exist_ok=True)
    for item in source.iterdir():
        if any(item.match(pattern) for pattern in NOT_COPIED):
            continue
        if item.is_symlink() and (item.is_dir() or not any(map(item.resolve().is_relative_to, roots))):
            raise WeightsError(f"{item} is a link to {item.resolve()}: put the file itself there, or remove the link")
        if item.is_dir():
            _copy_companions(item, target / item.name, roots)
        else:
            shutil.copyfile(item, target / item.name)
