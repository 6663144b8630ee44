"""Distribution of batches: every rank gets the same one.

waits for     the batch source on rank 0; rank 0's broadcast on the other ranks
deadline      that of the batch source, on rank 0; the process group's timeout is longer
on failure    rank 0 raises PeerFailed or DeadlineExceeded; the other ranks get an error from the collective
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.parallel import Parallel, from_first
from asyncrl.schema import Batch, decode_batch
from asyncrl.trainer.batch_source import BatchSource

STOPPED = b"stop"
"""Broadcast instead of a batch when the run is asked to stop."""


class BatchFeed:
    """The batches of a run, in one or several parts: rank 0 fetches the bytes once and broadcasts them to every
    rank."""

    def __init__(
        self,
        source: BatchSource | None,
        interrupt: Callable[[], bool],
        parallel: Parallel,
        *,
        parts: int = 1,
        asked_to_stop: Callable[[], bool] = lambda: False,
        take_back: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Set up the feed of batches in `parts` parts. Only rank 0 has a `source` and calls the callbacks, except for
        `take_back`, which every rank calls when a batch has arrived. With `group` the ranks wait for rank 0 on the
        host: a kernel that waits on a GPU would hold up a publish in the background, or take time from engines on the
        same GPU."""
        self._group = group
        self._source = source
        self._interrupt = interrupt
        self._parallel = parallel
        self._asked = asked_to_stop
        self._take_back = take_back
        self._parts = parts
        self.stopped = False
        """Whether no further batch will come because the run is asked to stop. The same on every rank."""

    def get(self, version: int, part: int = 0) -> Batch | None:
        """Wait until this part of batch `version` arrives. Returns None if `interrupt` says that none will come, or if
        the run is asked to stop; it does not stop within a batch."""
        data = self._fetch(version, part) if self._source else b""
        if dist.get_world_size() > 1:
            data = self._broadcast(data)
        self.stopped = data == STOPPED
        if not data or self.stopped:
            return None
        batch = decode_batch(data)
        assert batch.version == version, f"asked for batch {version}, received {batch.version}"
        self._take_back()
        return batch

    def evaluate(self) -> list[dict[str, Any]] | None:
        """Return the lines of an evaluation of what is served; None if `interrupt` says that none will come."""
        return from_first(self._source.evaluate(self._interrupt) if self._source else None, self._group)

    def _fetch(self, version: int, part: int) -> bytes:
        """Return the part, or what comes instead of it."""
        assert self._source

        def stops() -> bool:
            return part == 0 and self._asked()

        data = b""
        if not stops():
            data = self._source.batch(version, part, self._parts, interrupt=lambda: stops() or self._interrupt())
        return data or (STOPPED if stops() else b"")

    def _broadcast(self, data: bytes) -> bytes:
        device = self._parallel.device
        size = torch.tensor(len(data), device="cpu" if self._group else device)
        dist.broadcast(size, src=0, group=self._group)
        if int(size) == 0:
            return b""
        if self._parallel.is_first:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        else:
            payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(payload, src=0)
        return payload.cpu().numpy().tobytes()
