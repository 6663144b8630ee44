"""How the bytes of a bucket reach the engines. Two media behind one protocol; the bytes are always one flat bucket.

tensor       one host: the bucket lies in shared memory (CPU) or is a CUDA IPC handle; HTTP carries the handle
distributed  any host: HTTP carries names, dtypes and shapes; one gloo or NCCL broadcast carries the bytes
"""

from __future__ import annotations

import base64
import dataclasses
import io
import socket
import sys
import types
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from asyncrl.engine.control import Fleet
from asyncrl.weights.bucket import Entry


class Transport(Protocol):
    """Sends one filled bucket to every engine, and returns when all have loaded it."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for a bucket, uint8."""
        ...

    def connect(self) -> None:
        """Once, before the first bucket."""
        ...

    def send(self, flat: Tensor, entries: list[Entry]) -> None:
        """Raises EngineError when an engine does not load it."""
        ...


def choose(setting: str, engine_hosts: set[str], host: str) -> tuple[str, str]:
    """The transport for `weights.transport`, and why."""
    if setting != "auto":
        return setting, "as configured"
    if engine_hosts <= {host, "127.0.0.1", "localhost", "::1"}:
        return "tensor", "all engines are on this host: buckets travel through shared memory"
    return "distributed", f"engines are on {sorted(engine_hosts)}: buckets travel by broadcast"


class TensorTransport:
    """Through shared memory or CUDA IPC. The bucket's memory stays ours and is filled anew for each publish."""

    def __init__(self, fleet: Fleet, engine_tp: int) -> None:
        self._fleet, self._engine_tp = fleet, engine_tp

    def connect(self) -> None:
        """Nothing to set up."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Shared memory on CPU. The default sharing by file descriptor needs both ends to share a parent's secret."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        torch.multiprocessing.set_sharing_strategy("file_system")
        return torch.empty(nbytes, dtype=torch.uint8).share_memory_()

    def send(self, flat: Tensor, entries: list[Entry]) -> None:
        """A handle of its own for every engine and tensor-parallel rank: each takes its part of every tensor.

        Shared memory is counted: a handle adds one, opening it takes one away, so no handle may be opened twice.
        """
        if flat.is_cuda:
            torch.cuda.synchronize()
        metadata = [_metadata_class()(e.name, e.shape, e.dtype, e.start, e.end, e.end - e.start) for e in entries]
        bodies = [
            {
                "serialized_named_tensors": [_handle(flat, metadata) for _ in range(self._engine_tp)],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            for _ in self._fleet.urls
        ]
        self._fleet.finish(self._fleet.start("/update_weights_from_tensor", bodies))


def _handle(flat: Tensor, metadata: list[Any]) -> str:
    """What SGLang's MultiprocessingSerializer would make: the bytes stay where they are."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


def _metadata_class() -> Any:
    """The one class that SGLang's unpickler looks up by name. Importing sglang for it would cost 0.7 GB and seconds."""
    name = "sglang.srt.weight_sync.tensor_bucket"
    if name not in sys.modules:
        module = types.ModuleType(name)
        fields = [
            ("name", str),
            ("shape", torch.Size),
            ("dtype", torch.dtype),
            ("start_idx", int),
            ("end_idx", int),
            ("numel", int),
        ]
        made = dataclasses.make_dataclass("FlattenedTensorMetadata", fields)
        made.__module__ = name
        module.FlattenedTensorMetadata = made  # type: ignore[attr-defined]
        for parent in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[name] = module
    return sys.modules[name].FlattenedTensorMetadata


class DistributedTransport:
    """A process group of this rank and every engine rank, of its own beside the trainer's default group."""

    def __init__(self, fleet: Fleet, engine_tp: int, *, host: str, name: str, backend: str, timeout: float) -> None:
        self._fleet, self._engine_tp, self._host = fleet, engine_tp, host
        self._name, self._backend, self._timeout = name, backend, timeout
        self._group: dist.ProcessGroup | None = None

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def connect(self) -> None:
        """Rank 0 is this process; engine i holds ranks 1 + i * tp onwards. All join at once."""
        world = 1 + len(self._fleet.urls) * self._engine_tp
        port = _free_port(self._host)
        joining = self._fleet.start(
            "/init_weights_update_group",
            [
                {
                    "master_address": self._host,
                    "master_port": port,
                    "rank_offset": 1 + i * self._engine_tp,
                    "world_size": world,
                    "group_name": self._name,
                    "backend": self._backend,
                }
                for i in range(len(self._fleet.urls))
            ],
        )
        self._group = _group_beside_the_default(
            self._backend, f"tcp://{self._host}:{port}", world, self._name, self._timeout
        )
        self._fleet.finish(joining)

    def send(self, flat: Tensor, entries: list[Entry]) -> None:
        """The engines must be receiving before the broadcast begins."""
        body = {
            "names": [e.name for e in entries],
            "dtypes": [str(e.dtype).removeprefix("torch.") for e in entries],
            "shapes": [list(e.shape) for e in entries],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        receiving = self._fleet.start("/update_weights_from_distributed", [body] * len(self._fleet.urls))
        dist.broadcast(flat, src=0, group=self._group)
        self._fleet.finish(receiving)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _group_beside_the_default(backend: str, url: str, world: int, name: str, timeout: float) -> dist.ProcessGroup:
    """A process group that other programs may join (as SGLang's init_custom_process_group does, from the same parts).

    torch's new_group only splits the default group; this one has a store and a world of its own.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    wait = timedelta(seconds=timeout)
    store, rank, world = next(rendezvous(url, 0, world, timeout=wait))
    store.set_timeout(wait)
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        backend_options=None,
        timeout=wait,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def build(
    setting: str, fleet: Fleet, *, engine_tp: int, host: str, stage: int, gpu: bool, timeout: float
) -> tuple[Transport, str]:
    """The transport of one pipeline stage's sender, and the reason for the choice."""
    name, reason = choose(setting, {str(urlsplit(url).hostname) for url in fleet.urls}, host)
    if name == "tensor":
        return TensorTransport(fleet, engine_tp), f"tensor ({reason})"
    backend = "nccl" if gpu else "gloo"
    transport = DistributedTransport(
        fleet, engine_tp, host=host, name=f"asyncrl-stage{stage}", backend=backend, timeout=timeout
    )
    return transport, f"distributed over {backend} ({reason})"
