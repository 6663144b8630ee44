"""Disk transport: safetensors files on a shared file system, written while the engines still generate."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.weights.bucket import Bucket, views
from asyncrl.weights.folder import write_stream
from asyncrl.weights.transport import Transport
from asyncrl.weights.transports import claim

KEPT = 2
"""Number of versions that stay on disk: the engines keep the path of the last one."""


class DiskTransport(Transport):
    """SGLang's update_weights_from_disk. A version's folder gets its final name only when it is complete.

    The files are written before the pause from two buckets of memory, whatever `weights.staging` says.
    """

    ahead = True
    session = False

    def __init__(self, fleet: Fleet, folder: Path, stage: int, **_: object) -> None:
        self._fleet = fleet
        self._root = folder
        self._stage = stage
        self._version = 0
        self._written = 0

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate CPU memory, from which the files are written."""
        return super().allocate(nbytes, torch.device("cpu"))

    def start(self, version: int, *, full: bool = False) -> None:
        """Create a folder for this version. Exporting ranks call it, rank 0 before the others. Raises WeightsError if
        the folder of all versions belongs to another user."""
        self._version = version
        self._written = 0
        claim(self._root)
        if self._stage == 0:
            shutil.rmtree(self._partial(version), ignore_errors=True)
        self._partial(version).mkdir(exist_ok=True)

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Write one file. Raises WeightsError if the disk cannot take it."""
        write_stream(self._next_file(), bucket, iter(views(flat, bucket).items()), durable=False)

    def deliver(self, version: int) -> bool:
        """Publish the folder and let the engines load it."""
        folder = self._commit(version)
        # otherwise SGLang would take the format that the engine was started with, which may be that of random weights
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False}
        self._fleet.call("/update_weights_from_disk", body)
        self._forget_old(version)
        return True

    def _next_file(self) -> Path:
        self._written += 1
        return self._partial(self._version) / f"model-stage{self._stage}-{self._written:05d}.safetensors"

    def _commit(self, version: int) -> Path:
        folder = self._root / f"v{version:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(self._partial(version), folder)
        return folder

    def _partial(self, version: int) -> Path:
        return self._root / f"v{version:06d}.partial"

    def _forget_old(self, version: int) -> None:
        for folder in sorted(self._root.glob("v*"))[:-KEPT]:
            if folder.name < f"v{version:06d}":
                shutil.rmtree(folder, ignore_errors=True)
