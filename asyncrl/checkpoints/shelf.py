"""The checkpoints of a run: the newest that is whole, room for another, and those that may go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.errors import RecordError

FOLDER = "checkpoints"
SPARE_BYTES = 64 << 20
"""What is left of a disk beside a checkpoint: the run writes other things, too."""


class Shelf:
    """RUN/checkpoints; it need not be there."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def path(self, version: int) -> Path:
        """Of a version's checkpoint."""
        return self.folder / f"{version:08d}"

    def versions(self) -> list[int]:
        """Ascending, of whatever has a manifest; whether it is whole is another question."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{manifest.NAME}"))

    def newest(self, tell: Callable[[str], None]) -> tuple[Path, Manifest] | None:
        """The newest that is whole, or None; of every damaged one that is passed over it tells."""
        for version in reversed(self.versions()):
            try:
                return self.path(version), manifest.verified(self.path(version))
            except RecordError as error:
                tell(f"checkpoint {version} is refused: {error}")
        return None

    def lacks(self, size: int) -> str | None:
        """Why no checkpoint of so many bytes fits on the disk, or None."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free >= size + SPARE_BYTES:
            return None
        return f"it takes {size / 1e9:.2f} GB, and the disk of {self.folder} has {free / 1e9:.2f} GB left"

    def make_room(self, version: int) -> Path:
        """An empty folder for this version; what stood there was rolled back, or never whole."""
        path = self.path(version)
        self.remove(path)
        path.mkdir(parents=True)
        return path

    def prune(self, keep_last: int, keep_every: int | None) -> None:
        """Remove what need not be kept, and what was cut short."""
        versions = self.versions()
        kept = set(versions[-keep_last:])
        kept |= {version for version in versions if keep_every and version % keep_every == 0}
        for path in self.folder.glob("[0-9]*"):
            if int(path.name) not in kept:
                self.remove(path)

    def remove(self, path: Path) -> None:
        """Its manifest first: half a checkpoint must not look like one."""
        (path / manifest.NAME).unlink(missing_ok=True)
        if path.exists():
            shutil.rmtree(path)
