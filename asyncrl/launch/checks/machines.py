"""Checks of the machines and GPUs that a run asks for against those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from asyncrl.config import AuxiliaryModelConfig, Config, EngineConfig, TrainerConfig, on_gpu
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Node, Placement
from asyncrl.platforms import without_gpu

SHOWN = 4
"""Number of machines that a finding names."""
ON_THE_SAME = "Or let engines use the trainers' GPUs: set cluster.placement=shared, or colocated (docs/parallelism.md)."


def check_idle(nodes: Sequence[Node], placement: Placement) -> list[Finding]:
    """Warn of machines and GPUs of a job to which no process is assigned."""
    seats = (placement.router, placement.rollout, *placement.trainers, *chain(*placement.fleets.values()))
    found = []
    for node in nodes:
        used = {place for seat in seats if seat.node.name == node.name for place in seat.gpus}
        if node.gpus and len(used) < len(node.gpus):
            found.append(f"{len(node.gpus) - len(used)} of the {len(node.gpus)} GPUs of {node.name}")
        elif not node.gpus and not any(seat.node.name == node.name for seat in seats):
            found.append(f"machine {node.name}")
    if not found:
        return []
    remedy = (
        "Raise engine.count or trainer.data_parallel, or take fewer machines (cluster.nodes) or GPUs (cluster.gpus)."
    )
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return [warning("cluster.nodes", f"no process uses {', '.join(found[:SHOWN])}{more}", remedy)]


def check_ports(nodes: Sequence[Node], wanted: int) -> list[Finding]:
    """Check that every machine has enough free ports."""
    remedy = f"{wanted} are needed: stop what listens there, or set cluster.host to another address."
    found = [
        error("cluster.host", f"{node.name} has {len(node.ports)} free ports at {node.address}", remedy)
        for node in nodes
        if len(node.ports) < wanted
    ]
    where = ", ".join(node.address for node in nodes[:SHOWN]) + (", ..." if len(nodes) > SHOWN else "")
    return found or [ok("ports", f"{wanted} free on each of {len(nodes)} machine(s), at {where}")]


def check_gpus(nodes: Sequence[Node], machines: Sequence[MachineFacts]) -> list[Finding]:
    """Check the GPUs of each machine. `nodes` and `machines` are in the same order."""
    if not any(node.gpus for node in nodes):
        idle = sum(len(machine.gpus) for machine in machines)
        note = f"; the {idle} visible GPUs stay unused" if idle else ""
        return [ok("cluster.gpus", f"no GPU is used{note}")]
    found, models = [], set()
    for node, machine in zip(nodes, machines, strict=True):
        if not node.gpus:
            continue
        visible = machine.visible(node.gpus)
        models |= {(one.name, one.memory) for one in visible}
        if not machine.gpus:
            remedy = "Is the driver installed? Without nvidia-smi neither their number nor their memory can be checked."
            found.append(warning("cluster.gpus", f"{_named(machine)}: nvidia-smi lists no GPU", remedy))
        elif len(visible) < len(node.gpus):
            text = f"{_named(machine)} shows {len(visible)} of the {len(node.gpus)} GPUs {','.join(node.gpus)}"
            remedy = "Lower cluster.gpus, or take machines with more."
            found.append(error("cluster.gpus", text, remedy))
    if len(models) > 1:
        kinds = ", ".join(sorted(f"{name} ({memory >> 20} MiB)" for name, memory in models))
        remedy = "The slowest GPU sets the pace and the smallest the memory: use machines of one kind."
        found.append(warning("cluster.gpus", f"the GPUs are of different kinds: {kinds}", remedy))
    each = max(len(node.gpus) for node in nodes)
    kind = next(iter(sorted(models)), ("unknown", 0))[0]
    return found or [
        ok("cluster.gpus", f"{each} GPU(s) on each of {sum(bool(n.gpus) for n in nodes)} machine(s): {kind}")
    ]


def _named(machine: MachineFacts) -> str:
    return machine.name or "this machine"


def check_platforms(config: Config, gpus: int) -> None:
    """Refuse parts without GPUs if no extension has a platform for them, and engines with what their platform lacks."""
    for name, section, _ in _fleets(config):
        if on_gpu(section, gpus):
            continue
        try:
            platform = without_gpu()
        except LaunchError as error:
            raise ConfigError(f"{name}.device", section.device, str(error)) from None
        if name == "engine":
            platform.check_engine(config.engine)


def check_devices(config: Config, gpus: int) -> None:
    """Refuse more GPU ranks than GPUs; on CPU any number of processes may share the cores."""
    wanted = 0
    for name, section, ranks in _fleets(config):
        if section.device == "cuda" and gpus == 0:
            raise ConfigError(f"{name}.device", "cuda", "This machine has no visible GPU: use cpu or auto.")
        wanted += ranks if on_gpu(section, gpus) else 0
    if config.cluster.shares_gpus and on_gpu(config.engine, gpus):
        wanted -= config.engine.started * config.engine.ranks  # they use the trainers'
    if wanted > gpus:
        raise ConfigError(
            "trainer × engine ranks",
            wanted,
            f"The machine has {gpus} GPUs: lower trainer.tensor_parallel, pipeline_parallel, context_parallel or "
            f"data_parallel ({config.trainer.world_size} ranks), or engine.count × engine.tensor_parallel"
            + "".join(
                f", or {role}.count × {role}.tensor_parallel" for role, one in config.frozen.items() if one.started
            )
            + (f". {ON_THE_SAME}" if config.mode == "train" and not config.cluster.shares_gpus else "."),
        )


def _fleets(config: Config) -> Iterator[tuple[str, TrainerConfig | EngineConfig | AuxiliaryModelConfig, int]]:
    """Yield name and section of each part of which this run starts ranks, and their number."""
    trains, generates = config.trains, config.generates
    if trains:
        yield "trainer", config.trainer, config.trainer.world_size
    for name, section in config.fleets.items() if generates else ():
        if section.started:
            yield name, section, section.started * section.ranks
