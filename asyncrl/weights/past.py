"""Past versions of adapters that play roles (agents.roles.NAME.past), as PEFT folders RUN/past/ADAPTER/v000012.

A folder holds what the engines got when its version was published. It stays as long as the newest version or a
checkpoint needs it: a run that resumes there loads it into the engines again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.peft import read_peft, write_peft

FOLDER = "past"


class PastAdapters:
    """The folders of a run, on rank 0."""

    def __init__(
        self,
        run_dir: Path,
        origin: Path | None,
        needed: Callable[[int], dict[str, list[int]]],
        checkpoints: Callable[[], list[int]],
        describe: Callable[[dict[str, Tensor]], dict[str, Any]],
    ) -> None:
        """`origin` is the folder of the run whose checkpoint is resumed. `needed` returns the past versions of each
        adapter that may play while a version is the newest, `checkpoints` the versions of all checkpoints, and
        `describe` the adapter_config.json of an adapter."""
        self._root = run_dir / FOLDER
        self._origin = origin
        self.needed = needed
        self._checkpoints = checkpoints
        self._describe = describe

    def write(self, version: int, adapter: str, tensors: dict[str, Tensor]) -> None:
        """Write a version that is published, if it will play a role. Raises WeightsError if the disk cannot take it."""
        if version in self.needed(version).get(adapter, ()):
            write_peft(_folder(self._root, adapter, version), self._describe(tensors), tensors.items())

    def read(self, version: int, adapter: str) -> dict[str, Tensor]:
        """Read a version that was published earlier, from the run that is resumed if this one has a new folder. Raises
        WeightsError if it is missing."""
        folder = _folder(self._root, adapter, version)
        if self._origin and not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            source = _folder(self._origin / FOLDER, adapter, version)
            if source.exists():
                shutil.copytree(source, partial)
                os.rename(partial, folder)
        try:
            return read_peft(folder)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{folder}, a past version that plays a role (agents.roles), cannot be read: {error}. Copy the folder "
                f"{FOLDER} of the run that is resumed, or remove that role."
            ) from None

    def prune(self, newest: int) -> None:
        """Delete the versions that neither the newest version nor a checkpoint needs."""
        needed = [self.needed(version) for version in {newest, *self._checkpoints()}]
        for folder in self._root.glob(f"*/v{'[0-9]' * 6}"):
            adapter, version = folder.parent.name, int(folder.name[1:])
            if not any(version in one.get(adapter, ()) for one in needed):
                shutil.rmtree(folder, ignore_errors=True)


def _folder(root: Path, adapter: str, version: int) -> Path:
    return root / adapter / f"v{version:06d}"
