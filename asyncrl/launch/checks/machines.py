"""Checks of the machines and GPUs that a run asks for against those that there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncrl.config import AuxiliaryModelConfig, Config, EngineConfig, TrainerConfig, on_gpu
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Node, Seat
from asyncrl.lookup import active
from asyncrl.platforms import without_gpu

ON_THE_SAME = "Or let engines use the trainers' GPUs: set cluster.placement=shared, or another (docs/parallelism.md)."


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


def check_gpu_kinds(
    config: Config, seats: Iterable[Seat], nodes: Sequence[Node], machines: Sequence[MachineFacts]
) -> None:
    """Refuse settings with which an engine dies at its start, or at its second version, on the GPUs of its seats.
    `machines` has what is known of `nodes`, in their order. Raises ConfigError."""
    known = {node.name: machine for node, machine in zip(nodes, machines, strict=False)}
    placed = [(known[seat.node.name], seat.visible.split(",")) for seat in seats if seat.node.name in known]
    for gpu in sorted({one.name for machine, visible in placed for one in machine.visible(visible)}):
        for extension in active(config).values():
            for problem in extension.launch().check_gpu(config, gpu):
                raise problem


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
