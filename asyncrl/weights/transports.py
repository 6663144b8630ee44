"""The transport of a run, built from its settings."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.user_code import load
from asyncrl.weights.choice import choose
from asyncrl.weights.distributed import DistributedTransport
from asyncrl.weights.transport import TensorTransport, Transport


def build_transport(
    config: Config, fleet: Fleet, *, host: str, alone: bool, stage: int, gpu: bool, folder: Path
) -> tuple[Transport, str]:
    """Build the transport of one pipeline stage's exporting rank. Returns it with the reason for the choice.

    `host` is the rank's address. `alone` says that all trainer ranks are on that host; otherwise the host is not used,
    because stages on several machines must make the same choice. `gpu` says whether the trainer runs on GPUs. `folder`
    is where files are written.
    """
    ranks = config.engine.ranks
    shared, host_of_all = config.cluster.shares_gpus, host if alone else ""
    name, reason = choose(config.weights.transport, list(fleet.urls), host_of_all, gpu=gpu, shared=shared)
    if name == "tensor":
        return TensorTransport(fleet, ranks), f"tensor ({reason})"
    if offered := config.transport:
        kind = load(offered.path, "weights.transport")
        transport = kind(fleet=fleet, folder=folder, stage=stage, ranks=ranks, host=host, gpu=gpu)
        return transport, f"{name} in {folder} ({reason})" if offered.by_file else f"{name} ({reason})"
    backend = "nccl" if gpu else "gloo"
    transport = DistributedTransport(fleet, ranks, host=host, stage=stage, backend=backend)
    return transport, f"distributed over {backend} ({reason})"
