"""Checkpoints of a run: find the newest complete one, make room for another, remove old ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.errors import RecordError

FOLDER = "checkpoints"
SPARE_BYTES = 64 << 20
"""Disk space that must remain free after a checkpoint: the run writes other files, too."""


class CheckpointStore:
    """The folder RUN/checkpoints; it need not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def path(self, version: int) -> Path:
        """Return the folder of a version's checkpoint."""
        return self.folder / f"{version:08d}"

    def versions(self) -> list[int]:
        """Return the versions of all folders with a manifest, ascending; they may still be damaged."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{manifest.NAME}"))

    def begun(self) -> list[int]:
        """Return the versions of all folders, of which one may be in the making."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*"))

    def newest(self, tell: Callable[[str], None]) -> tuple[Path, Manifest] | None:
        """Return the newest undamaged checkpoint, or None. `tell` receives a message for each damaged one that is
        skipped."""
        for version in reversed(self.versions()):
            try:
                return self.path(version), manifest.verified(self.path(version))
            except RecordError as error:
                tell(f"checkpoint {version} is skipped: {error}")
        return None

    def lacks(self, size: int) -> str | None:
        """Say why a checkpoint of so many bytes does not fit on the disk; return None if it does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        needed, free = size + SPARE_BYTES, shutil.disk_usage(self.folder).free
        if free >= needed:
            return None
        return f"it needs {needed / 1e9:.2g} GB, but the disk of {self.folder} has only {free / 1e9:.2g} GB left"

    def make_room(self, version: int) -> Path:
        """Create an empty folder for this version. An existing one was rolled back or never completed, and is
        removed."""
        path = self.path(version)
        self.remove(path)
        path.mkdir(parents=True)
        return path

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Remove checkpoints that need not be kept, and incomplete ones."""
        versions = self.versions()
        kept = set(versions[-keep_last:])
        kept |= {version for version in versions if keep_every and version % keep_every == 0}
        for path in self.folder.glob("[0-9]*"):
            if int(path.name) not in kept:
                self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, its manifest first: a partial checkpoint must not look complete."""
        (path / manifest.NAME).unlink(missing_ok=True)
        if path.exists():
            shutil.rmtree(path)
