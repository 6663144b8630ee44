"""The batches since the last two checkpoints, as the trainers got them. Trainers that die start again from a checkpoint
and train these once more (trainer/recovery.py), which makes the same weights.

on failure    (a full disk) a warning, and no further batch is kept: the next death of a trainer ends the run
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.checkpoints.store import CheckpointStore

FOLDER = "journal"
KEPT = 2
"""Checkpoints whose batches are kept: the newest one may turn out to be damaged."""


class NoJournal:
    """Keeps nothing."""

    def keep(self, version: int, part: int, data: bytes) -> None:
        """Do nothing."""

    def read(self, version: int, part: int) -> bytes | None:
        """Return nothing."""
        return None


class Journal(NoJournal):
    """The folder RUN/journal, with a file for each part of a batch."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Start with an empty folder: a run that resumes makes its batches anew."""
        self._folder, self._warn, self._enabled = run_dir / FOLDER, warn, True
        self._store = CheckpointStore(run_dir)
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, version: int, part: int, data: bytes) -> None:
        """Keep an encoded part of a batch, before any trainer gets it, and remove what no trainer needs any more."""
        if not self._enabled:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            unfinished = self._folder / f"unfinished-{secrets.token_hex(8)}"
            unfinished.write_bytes(data)
            unfinished.rename(self._file(version, part))
        except OSError as error:
            self._enabled = False
            shutil.rmtree(self._folder, ignore_errors=True)
            self._warn(f"batches are no longer kept for trainers that die, whose next death ends the run: {error}")
            return
        oldest, *_ = [*self._store.versions()[-KEPT:], 0]
        for file in self._folder.glob("[0-9]*"):
            if int(file.name.partition("-")[0]) < oldest:
                file.unlink()

    def read(self, version: int, part: int) -> bytes | None:
        """Return a part that was kept; None if it was not."""
        file = self._file(version, part)
        return file.read_bytes() if file.exists() else None

    def _file(self, version: int, part: int) -> Path:
        return self._folder / f"{version:08d}-{part:04d}"
