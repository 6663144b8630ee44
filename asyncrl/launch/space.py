"""Whether a disk is full: said by the launcher, for a process that could not write could often not say why."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

ERRORS = (errno.ENOSPC, errno.EDQUOT)
PROBE = 64 << 10
"""Bytes."""


def full(folders: Iterable[Path]) -> list[str]:
    """One line for each of these folders in which nothing more can be written, for want of space or quota."""
    found = []
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in ERRORS:
                found.append(f"{os.strerror(error.errno)}: {folder}. Make room there; what is written stays.")
    return found
