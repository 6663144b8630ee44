"""One rank of test_offload.py: python rank_offload.py FOLDER, under torchrun. It is tests/integration/rank_offload.py,
which here also counts the FP8 copies of weights on the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration import rank_offload

Trained: Any = rank_offload.Trained


def copies(trained: Any) -> dict[int, int]:
    """Return the bytes of storages of FP8 copies, by identity."""
    kept = [
        copy
        for chunk in trained.network.wrapped
        for module in chunk.modules()
        for copy in getattr(module, "_fp8_workspaces", {}).values()
    ]
    assert bool(kept) == (trained.network.config.fp8 is not None and trained.updated)
    storages = [part.untyped_storage() for copy in kept for part in (copy._data, copy._transpose) if part is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}


class Counting(Trained):
    """A network whose FP8 copies are counted, whether DeviceMemory knows of them or not."""

    updated = False

    def update(self) -> None:
        super().update()
        self.updated = True

    def bytes_on_device(self) -> int:
        known = {one.untyped_storage()._cdata for part in self._held() for one in part}
        return super().bytes_on_device() + sum(size for key, size in copies(self).items() if key not in known)


if __name__ == "__main__":
    rank_offload.Trained = Counting
    torch.manual_seed(0)
    rank_offload.main(Path(sys.argv[1]))
