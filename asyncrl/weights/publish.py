"""Make a version the one that every engine serves.

    fill      every exporting rank copies its HF tensors into its buckets, while the engines still generate
    hold      the rollout side keeps new requests back
    session   pause in place -> begin -> buckets -> version -> end -> confirm -> continue   (engine/control.py)
    announce  the rollout side opens admission for the next cohort

The pause holds only the sending. With pipeline stages, each stage's first rank sends its own buckets, one stage after
the other, inside the session that rank 0 opened.

    waits for     the engines (weights.timeout a call), the other stages (the process group's timeout)
    on failure    the engines stay paused and the error ends the run: nobody samples from half-new weights
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.engine.control import Fleet, Pause
from asyncrl.parallel import Parallel
from asyncrl.weights.bucket import Entry, plan_buckets
from asyncrl.weights.transport import Transport

Stream = Iterable[tuple[str, Tensor]]


class Publisher:
    """One per trainer rank; only the exporting ranks hold buckets, only rank 0 speaks for the version."""

    def __init__(
        self,
        parallel: Parallel,
        fleet: Fleet,
        transport: Transport,
        bucket_bytes: int,
        stream: Callable[[], Stream],
        *,
        hold: Callable[[], None],
        announce: Callable[[int], None],
    ) -> None:
        self._parallel, self._fleet, self._transport = parallel, fleet, transport
        self._bucket_bytes = bucket_bytes
        self._stream, self._hold, self._announce = stream, hold, announce
        self._buckets: list[tuple[Tensor, list[Entry]]] | None = None
        self._connected = False

    def prepare(self) -> None:
        """Plan and allocate the buckets. Runs on every rank while the engines still load; needs none of them."""
        self._buckets = []
        if self._parallel.dp_rank == 0:
            described = [(name, tensor.dtype, tensor.shape) for name, tensor in self._stream()]
            planned = plan_buckets(described, self._bucket_bytes) if self._parallel.exports else []
            self._buckets = [(self._transport.allocate(e[-1].end, self._parallel.device), e) for e in planned]

    def publish(self, version: int) -> dict[str, float]:
        """Runs on every rank. Returns seconds of filling and of the pause, and bytes sent by this rank."""
        started = time.monotonic()
        self._fill()
        filled = time.monotonic()
        first = self._parallel.is_first
        if first:
            self._hold()
        with self._fleet.new_weights(version) if first else nullcontext(Pause(filled)) as pause:
            self._send_in_turn()
        if first:
            self._announce(version)
        nbytes = sum(flat.numel() for flat, _ in self._buckets or [])
        return {"fill": filled - started, "pause": pause.seconds, "bytes": float(nbytes)}

    def _fill(self) -> None:
        """Copy the current weights into the buckets."""
        if self._parallel.dp_rank != 0:
            return  # replicas hold the same weights
        if self._buckets is None:
            self.prepare()
        if not self._connected and self._parallel.exports:
            self._transport.connect()
            self._connected = True
        stream = iter(self._stream())  # every tensor-parallel rank walks it: it gathers
        for flat, entries in self._buckets or []:
            for entry in entries:
                name, tensor = next(stream)
                assert name == entry.name, f"the stream gave {name} in the place of {entry.name}"
                flat[entry.start : entry.end].view(entry.dtype).view(entry.shape).copy_(tensor)
        if not self._buckets:
            for _ in stream:
                pass
        assert next(stream, None) is None, "the stream gave more tensors than were planned"

    def _send_in_turn(self) -> None:
        """Stage after stage; a barrier tells the next that the engines are free, and rank 0 that all is sent."""
        if self._parallel.pp == 1:
            self._send()
            return
        dist.barrier()  # rank 0 has opened the session
        for stage in range(self._parallel.pp):
            if self._parallel.pp_rank == stage:
                self._send()
            dist.barrier()

    @torch.no_grad()
    def _send(self) -> None:
        if self._parallel.exports:
            for flat, entries in self._buckets or []:
                self._transport.send(flat, entries)
