"""Construction of the configured transport."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config
from asyncrl.engine.control import Fleet
from asyncrl.weights.choice import choose
from asyncrl.weights.delta import DeltaTransport
from asyncrl.weights.disk import DiskTransport
from asyncrl.weights.distributed import DistributedTransport
from asyncrl.weights.tensor import TensorTransport
from asyncrl.weights.transport import Transport


def build_transport(
    config: Config, fleet: Fleet, *, host: str, alone: bool, stage: int, gpu: bool, folder: Path
) -> tuple[Transport, str]:
    """Build the transport of one pipeline stage's exporting rank. Returns it with the reason for the choice.

    `host` is the rank's address. `alone` says that all trainer ranks are on that host; otherwise the host is not used,
    because stages on several machines must make the same choice. `gpu` says whether the trainer runs on GPUs. `folder`
    is where disk and delta write.
    """
    engine_tp = config.engine.tensor_parallel
    name, reason = choose(config.weights.transport, list(fleet.urls), host if alone else "", gpu=gpu)
    if name == "tensor":
        return TensorTransport(fleet, engine_tp), f"tensor ({reason})"
    if name == "disk":
        return DiskTransport(fleet, folder, stage), f"disk in {folder} ({reason})"
    if name == "delta":
        return DeltaTransport(fleet, folder, stage, engine_tp), f"delta in {folder} ({reason})"
    backend = "nccl" if gpu else "gloo"
    transport = DistributedTransport(fleet, engine_tp, host=host, stage=stage, backend=backend)
    return transport, f"distributed over {backend} ({reason})"
