"""Checkpoint format: a folder with a manifest, written last, that lists its files with their sizes and SHA-256.

    RUN/checkpoints/00000040/
        policy/        Megatron's torch_dist format: weights and moments, float32           (trainer/sharded.py)
                       (with trainer.lora, those of the adapters; the manifest has the hash of their base)
        critic/        likewise, with algo.advantage=gae
        trainer.json   counters of the optimizers, the stop rule and the log                (trainer/checkpoint.py)
        extensions.msgpack  states of extensions, by name
        rollout.msgpack  state of the whole rollout side                                    (rollout/snapshot.py)
        manifest.json

A folder without a manifest is incomplete; one that differs from its manifest is damaged. The manifest is checked before
anything else in a folder is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import RecordError

NAME = "manifest.json"
COUNTERS, EXTENSIONS, ROLLOUT = "trainer.json", "extensions.msgpack", "rollout.msgpack"
"""Files of a checkpoint besides those of its networks."""
FORMAT = 1
_READERS = 16


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of one file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of a complete checkpoint."""

    format: int
    version: int  # served by the engines
    run_id: str  # of the launch that wrote it
    time: float  # time.time()
    config: dict[str, Any]
    files: dict[str, FileEntry]  # by path within the folder
    base: str | None = None  # HFFolder.digest of the model folder, of whose weights the checkpoint holds adapters


def describe(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Read these files and return their entries."""
    return {name: _entry(folder / name) for name in names}


def commit(folder: Path, manifest: Manifest) -> None:
    """Turn the folder into a checkpoint, atomically."""
    partial = folder / f"{NAME}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / NAME)
    for place in (folder, folder.parent):
        _sync(place)


def read(folder: Path) -> Manifest:
    """Read the manifest, and no other file. Raises RecordError if there is none that can be read."""
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise RecordError(f"{folder} has no {NAME}: it was not written completely") from None
    except OSError as error:
        raise RecordError(f"{folder / NAME} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError(f"{folder / NAME} is damaged: {error}") from None
    if manifest.format != FORMAT:
        raise RecordError(f"{folder} has format {manifest.format}, but this version of asyncrl reads {FORMAT}")
    return manifest


def verified(folder: Path) -> Manifest:
    """Return the manifest of a folder after checking that every file is as it was written. Raises RecordError for the
    first file that is not."""
    manifest = read(folder)
    outside = [name for name in manifest.files if name.startswith("/") or ".." in Path(name).parts]
    if outside:
        raise RecordError(f"{folder / NAME} is damaged: it lists {outside[0]}, which is outside of the folder")
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        checks = [pool.submit(_check, folder, name, entry) for name, entry in manifest.files.items()]
        for check in checks:
            check.result()
    return manifest


def _check(folder: Path, name: str, entry: FileEntry) -> None:
    try:
        size = (folder / name).stat().st_size
        if size != entry.bytes:
            raise RecordError(f"{folder / name} is damaged: it has {size} bytes instead of {entry.bytes}")
        if _entry(folder / name) != entry:
            raise RecordError(f"{folder / name} is damaged: its checksum differs")
    except OSError as error:
        raise RecordError(f"{folder / name} cannot be read: {error.strerror}") from None


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileEntry(file.tell(), digest.hexdigest())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
