"""Transports of a bucket's bytes to the engines: one small protocol, two implementations, and those of extensions;
choice.py picks one.

tensor       one host: engines read the bucket in place, from shared memory (CPU) or through CUDA IPC; HTTP carries the
             handle
distributed  any host: HTTP carries names, dtypes and shapes; one gloo or NCCL broadcast carries the bytes
"""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from asyncrl.engine.fleet import Fleet
from asyncrl.weights.bucket import Bucket

SIZE, STRIDE, OFFSET, DEVICE = 1, 2, 3, 6  # indices of what torch's reduce_tensor returns for a CUDA tensor


class Transport(ABC):
    """Sends the buckets of one pipeline stage's exporting rank to every engine of the fleet."""

    ahead = False
    """Whether buckets are sent before the pause; then the engines are paused only for `deliver`."""
    memories = 2
    """Number of buckets that staging=stream needs: one is filled while another is sent."""
    turns = False
    """Whether pipeline stages must send one after the other."""
    session = True
    """Whether the engines need a weight-update session around the transfer."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate memory for a bucket, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, version: int, *, full: bool = False) -> None:
        """Prepare for the first bucket of a version. `full` requests all bytes, whatever the engines hold."""
        return  # most transports need no preparation

    @abstractmethod
    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Send one filled bucket. `flat` may be refilled when this returns. Engines that do not load the bucket are
        lost."""

    def deliver(self, version: int) -> bool:
        """Complete the transfer, on rank 0, during the pause, after every stage has sent. Returns False if the engines
        need the full weights."""
        return True

    def accepted(self, version: int) -> None:
        """Record that the engines serve what was sent; called on every rank."""
        return


class TensorTransport(Transport):
    """SGLang's update_weights_from_tensor with load_format flattened_bucket.

    On CPU an engine answers when every rank has copied. On CUDA, torch waits for a rank's copies before that rank
    releases its handle, but when the engine answers, only its rank 0 has certainly done so. The other ranks certainly
    have when the engine answers for the next bucket, so a stream needs three buckets there.
    """

    def __init__(self, fleet: Fleet, ranks: int) -> None:
        self._fleet = fleet
        self._ranks = ranks
        self.memories = 3 if torch.cuda.is_available() and ranks > 1 else 2
        self._shared = SharedBuffers()

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate shared memory on CPU."""
        return shared_memory(nbytes) if device.type == "cpu" else super().allocate(nbytes, device)

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Send a separate handle for every engine and rank; each rank takes its part of every tensor.

        Shared memory is reference-counted: a handle adds one reference and opening it removes one, so no handle may be
        opened twice.
        """
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        bodies = {
            url: {
                "serialized_named_tensors": [
                    handle(_Reduced(self._shared.reduce(flat)) if flat.is_cuda else flat, bucket)
                    for _ in range(self._ranks)
                ],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "selector": self._fleet.selector,
            }
            for url in self._fleet.urls
        }
        self._fleet.finish(self._fleet.start("/update_weights_from_tensor", bodies))


def shared_memory(nbytes: int) -> Tensor:
    """Allocate shared memory, as uint8. torch's default of sharing file descriptors requires both processes to share a
    parent's secret."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.empty(nbytes, dtype=torch.uint8).share_memory_()


def handle(shared: Any, bucket: Bucket) -> str:
    """Serialize a handle of a bucket's memory like SGLang's MultiprocessingSerializer; the bytes are not copied.

    Engines read the fields of their FlattenedTensorMetadata (sglang/srt/weight_sync/tensor_bucket.py) from any object
    whose class their unpickler allows. Importing sglang for its own class would cost 0.7 GB and seconds.
    """
    buffer = io.BytesIO()
    metadata = [
        SimpleNamespace(
            name=e.name, shape=e.shape, dtype=e.dtype, start_idx=e.start, end_idx=e.end, numel=e.end - e.start
        )
        for e in bucket
    ]
    ForkingPickler(buffer).dump({"flattened_tensor": shared, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class SharedBuffers:
    """Handles of CUDA buffers, each of which is shared with other processes once.

    Every call of torch's reduce_tensor wraps the storage's memory in one more record, with a counter of references and
    an event of its own, which are freed with the storage. Engines may open one handle any number of times: torch reads
    its counter only when the storage is freed. They need not wait for its event, because `send` waits for the GPU.
    """

    def __init__(self) -> None:
        self._reduced: dict[reductions.StorageWeakRef, tuple[Any, tuple[Any, ...]]] = {}

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Return what pickle writes for a tensor. It names its GPU by UUID, because engines may number the visible GPUs
        differently; the other half is sglang/srt/utils/patch_torch.py, which looks up the UUID."""
        storage = reductions.StorageWeakRef(tensor.untyped_storage())
        if storage not in self._reduced:
            rebuild, arguments = reductions.reduce_tensor(tensor)
            uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
            self._reduced[storage] = rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])
        rebuild, shared = self._reduced[storage]
        arguments = list(shared)
        arguments[SIZE], arguments[STRIDE], arguments[OFFSET] = tensor.size(), tensor.stride(), tensor.storage_offset()
        return rebuild, tuple(arguments)


class _Reduced:
    """An object that pickles as what it was given."""

    def __init__(self, reduced: tuple[Any, tuple[Any, ...]]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced
