"""Detect full disks. The launcher does this after a failure, because the process that could not write often could not
log the reason either."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

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
