"""What this folder adds: a placement in which engines and trainers use the same GPUs in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Rule, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses

COLOCATED = "colocated"
TURNS = "cluster.placement=colocated"
NO_TURNS = ("disaggregation_mode", "weight_cache_mode", "enable_memory_saver", "speculative_algorithm")
"""SGLang settings with which an engine cannot release its memory and take it back, or that the run itself sets."""
NO_HEALTH_TOKENS = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}


def _placement(config: Config) -> Iterator[Rule]:
    """Yield the rules of what cannot have this placement."""
    field, stage = "cluster.placement", "trainer.batch_parts"
    why = "Host caches of engines that release their memory were not tried: unset engine.hicache."
    yield field, config.generates and config.engine.hicache is not None, why
    why = f"Engines stand still while trainers work, so that no group would become ready. Change it, or set {stage}=1."
    yield field, config.trainer.batch_parts > 1, why
    why = (
        "Trainers cannot use the GPUs while engines load (weights.overlap): set separate, or set weights.overlap=false."
    )
    yield field, config.weights.overlap, why
    roles = config.agents.need_versions
    why = "An engine that releases its memory loses the adapters of roles (agents.roles): set separate."
    yield field, roles, why
    why = "An engine that releases its memory loses its adapters (weights.lora=versions): set weights.lora=merged."
    yield field, config.keeps_versions, why


def _rules(config: Config) -> Iterator[Rule]:
    """Yield the rules of settings that do not fit this placement."""
    why = (
        f"With {TURNS} an engine gives up its KV cache, and SGLang releases memory only while no request runs: set "
        "retract (requests are prefilled again), abort or drain."
    )
    yield "weights.pause_mode", config.weights.pause_mode == "in_place", why
    why = f"With {TURNS} only the checksums show that every released tensor was sent again: set true."
    yield "weights.verify", not config.weights.verify, why
    why = (
        f"With {TURNS} engines stand still while trainers work, so that more would only age the samples: set 0 "
        "(synchronous) or 1 (one step off)."
    )
    yield "rollout.max_staleness", config.rollout.max_staleness > 1, why
    why = f"{TURNS} moves the optimizer's states away by itself, with everything else: set false."
    yield "offload.optimizer", value_of(config, "offload.optimizer"), why
    for name in NO_TURNS:
        why = f"SGLang cannot take turns ({TURNS}) with it: remove it."
        yield f"engine.server_args.{name}", config.engine.server_args.get(name) is not None, why


class ColocatedLaunch(extension.LaunchHooks):
    """Starts engines that can release their memory."""

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return an engine of the policy with a memory saver, where it has a GPU, which does not generate to show its
        health, and is not started again while trainers use its GPUs."""
        from asyncrl.config import on_gpu

        if config.cluster.placement != COLOCATED or not spec.name.startswith("engine-"):
            return spec
        saver = ["--enable-memory-saver"] if on_gpu(config.engine, addresses.gpus) else []
        return replace(spec, argv=[*spec.argv, *saver], env={**spec.env, **NO_HEALTH_TOKENS}, shares=True)


class ColocatedEngines(extension.EngineHooks):
    """Engines that the trainers' first version reaches before the first request."""

    def needs_weights(self, config: Config) -> bool:
        """Return whether the engines have released their weights when the trainers start."""
        return config.cluster.placement == COLOCATED

    def install(self, argv: Sequence[str]) -> None:
        """Let SGLang release memory once, however often it is asked to."""
        from asyncrl.extensions.colocated import memory

        memory.install()


class ColocatedGpus(extension.Extension):
    """cluster.placement=colocated."""

    placements = {COLOCATED: "asyncrl.extensions.colocated.schedule:ColocatedSchedule"}  # noqa: RUF012
    metrics = {  # noqa: RUF012
        "time/release": "time from the batch's arrival until the engines had released their memory, part of "
        "time/wait_batch; time/pause is then the trainers' whole turn",
    }

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse what cannot work in turns."""
        if config.cluster.placement != COLOCATED:
            return
        for field, *_, broken, remedy in (*_placement(config), *_rules(config)):
            if broken:
                yield ConfigError(field, value_of(config, field), remedy)

    def launch(self) -> ColocatedLaunch:
        """Return what starts the engines."""
        return ColocatedLaunch()

    def engine(self) -> ColocatedEngines:
        """Return what engines need."""
        return ColocatedEngines()


Own = ColocatedGpus
