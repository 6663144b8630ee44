"""Images of a recording: one file for each, named by its content, however many groups and turns show it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from asyncrl.errors import RecordError
from asyncrl.images import image_name
from asyncrl.jsonl import opened

FOLDER = "images"
_NAME = re.compile("[0-9a-f]{64}")


def write(folder: Path, images: Mapping[str, bytes]) -> int:
    """Write the images that the recording in `folder` lacks, and return their size in bytes. Raises OSError."""
    written = 0
    for name, png in images.items():
        path = folder / FOLDER / f"{name}.png"
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(png)
        part.replace(path)
        written += len(png)
    return written


def read(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the images with these names. Raises RecordError if one is missing or damaged."""
    found = {}
    for name in names:
        path = folder / FOLDER / f"{name}.png"
        if not _NAME.fullmatch(name):
            raise RecordError(f"{folder} names an image {name!r:.80}, which is not the SHA-256 of a file")
        try:
            with opened(path, folder) as file:
                found[name] = file.read()
        except OSError as error:
            raise RecordError(f"the image {path} of the recording cannot be read: {error.strerror}") from None
        if image_name(found[name]) != name:
            raise RecordError(f"the image {path} of the recording is damaged: its content has another SHA-256")
    return found
