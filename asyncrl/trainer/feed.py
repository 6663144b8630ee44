"""The same batch on every rank.

waits for     the door, on rank 0; then rank 0's broadcast, on the others
deadline      the door's, which rank 0 owns; the process group's timeout lies above it
on death      a closed connection raises EngineError on rank 0, and a collective's error on the others
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncrl.parallel import Parallel
from asyncrl.trainer.door import Door
from asyncrl.types import Batch, decode_batch


class Batches:
    """The same batch on every rank: rank 0 fetches the bytes once, and broadcasts them."""

    def __init__(self, door: Door | None, interrupt: Callable[[], bool], parallel: Parallel) -> None:
        self._door, self._interrupt, self._parallel = door, interrupt, parallel

    def get(self, version: int) -> Batch | None:
        """Blocks until batch `version` is there. None when `interrupt`, asked on rank 0, says that none will come."""
        data = self._door.batch(version, interrupt=self._interrupt) if self._door else b""
        data = self._broadcast(data) if dist.get_world_size() > 1 else data
        if not data:
            return None
        batch = decode_batch(data)
        assert batch.version == version, f"asked for batch {version}, received {batch.version}"
        return batch

    def _broadcast(self, data: bytes) -> bytes:
        device = self._parallel.device
        size = torch.tensor(len(data), device=device)
        dist.broadcast(size, src=0)
        if int(size) == 0:
            return b""
        if self._parallel.is_first:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        else:
            payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(payload, src=0)
        return payload.cpu().numpy().tobytes()
