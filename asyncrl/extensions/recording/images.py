"""Images of a recording: one file for each, named by its content, however many groups and turns show it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = "images"


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
