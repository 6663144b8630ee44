"""What a run needs of its machines and disks, and how long it will take: checked before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config, cache_tokens, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.rules import resident_adapters
from asyncrl.extensions.plan import folders
from asyncrl.extensions.plan import memory as planner
from asyncrl.extensions.plan.memory_check import MemoryNeed, check_memory, in_turns
from asyncrl.extensions.plan.settings import layout_of, served_adapters, told_of_memory, training_of
from asyncrl.extensions.plan.shapes import Shape, counted, parameters, shape_of
from asyncrl.extensions.plan.sizing import packed
from asyncrl.extensions.plan.tensors import BYTES, Weight
from asyncrl.launch.checks.findings import Finding, error, ok
from asyncrl.launch.placement import Placement
from asyncrl.launch.prepare import Preparation
from asyncrl.weights.choice import choose


@dataclass(frozen=True)
class ModelFolder:
    """A complete model folder."""

    weights: list[Weight]
    shape: Shape


def models_of(prepared: Preparation) -> dict[str, ModelFolder]:
    """Return the complete model folders of a run, by role, except those of families that the trainer does not know."""
    found = {}
    for role, weights in prepared.weights.items():
        try:
            shape = shape_of(prepared.hf[role])
        except (ConfigError, KeyError):
            continue
        found[role] = ModelFolder(counted(weights.items(), shape), shape)
    return found


def check_room(prepared: Preparation, models: Mapping[str, ModelFolder]) -> Iterator[Finding]:
    """Check the transport of new weights, the memory of the machines, and the disks."""
    config = prepared.chosen.config
    if prepared.is_placed:
        if "model" in models:
            yield from check_sync(config, prepared.placement, models["model"].weights, prepared.gpus)
        cluster = prepared.cluster
        known = {node.name: machine for node, machine in zip(cluster.nodes, cluster.machines, strict=False)}
        yield from check_memory(prepared.placement, needs_of(config, prepared.gpus, models), known)
    yield from _folders(config, prepared.run_dir, models.get("model"))


def check_sync(config: Config, placement: Placement, weights: Sequence[Weight], gpus: int) -> list[Finding]:
    """Report the transport, the reason for it, and the size of a publish. `gpus` is per machine, as in
    addresses.json."""
    if config.mode != "train" or not placement.trainers:
        return []
    engines, gpu = (*placement.urls()["engines"], *config.engine.urls), on_gpu(config.trainer, gpus)
    hosts = {seat.node.address for seat in placement.trainers}
    try:
        host = hosts.pop() if len(hosts) == 1 else ""  # as weights/publish.py receives it
        shared, gpu = config.cluster.shares_gpus, gpu and not config.keeps_versions
        chosen, why = choose(config.weights.transport, engines, host, gpu=gpu, shared=shared)
    except ConfigError as problem:
        return [error(problem.field, str(problem.value), problem.remedy)]
    if config.keeps_versions:
        carried = "adapters in shared memory" if chosen == "tensor" else "adapters as PEFT folders"
        text = f"{carried}: {why}; at most {resident_adapters(config)} in each engine"
        return [ok("weights.transport", text)]
    item = BYTES[config.trainer.dtype]
    sizes = [one.elements * item for one in weights]
    count = len(packed(sizes, config.weights.bucket_mb << 20))
    text = f"{chosen}: {why}; {sum(sizes) / 1e9:.3g} GB per publish, in about {count} bucket(s)"
    return [ok("weights.transport", text)]


def needs_of(config: Config, gpus: int, models: Mapping[str, ModelFolder]) -> dict[str, MemoryNeed]:
    """Return the memory needs of each role."""
    needs: dict[str, MemoryNeed] = {}
    if (policy := models.get("model")) and config.trains:
        gpu = on_gpu(config.trainer, gpus)
        layout, training = layout_of(config.trainer), training_of(config, gpu=gpu)
        staged = planner.offloaded(policy.weights, policy.shape, layout, training)
        if config.checkpoint.every:
            staged += planner.checkpoint_staging(policy.weights, policy.shape, layout, training)
        parts = planner.trainer_rank(policy.weights, policy.shape, layout, training)
        needs["trainer"] = MemoryNeed(parts, gpu, staged, config.trainer_fraction)
    for name, section in config.fleets.items():
        if model := models.get("model" if name == "engine" else name):
            gpu = on_gpu(section, gpus)
            tokens = cache_tokens(section, gpu=gpu)
            parts = planner.engine_rank(
                model.weights,
                model.shape,
                tensor=section.tensor_parallel,
                dtype=section.dtype,
                tokens=tokens or config.rollout.max_new_tokens,
                cache_dtype=str(section.server_args.get("kv_cache_dtype") or ""),
                **(_divided(config) if name == "engine" else {}),
            )
            if tokens is None:  # it takes what fits; a run needs at least one answer's
                parts["KV cache of one answer"] = parts.pop("KV cache")
            own = ((config.engine.hicache or 0) * 10**9, config.engine_fraction) if name == "engine" else ()
            needs[name] = MemoryNeed(parts, gpu, *own)
    if config.cluster.placement == "colocated" and needs.keys() >= {"trainer", "engine"} and needs["engine"].gpu:
        needs["trainer"] = in_turns(needs["trainer"], needs["engine"])
    return needs


def _divided(config: Config) -> dict[str, Any]:
    """Return what else divides or fills the memory of an engine."""
    engine = config.engine
    divided = {"replicas": engine.data_parallel, "stages": engine.pipeline_parallel}
    return {**divided, "linear_bytes": told_of_memory(config).get("linear_bytes"), **served_adapters(config)}


def _folders(config: Config, run_dir: Path, policy: ModelFolder | None) -> Iterator[Finding]:
    elements, stored = parameters(policy.weights).all if policy else 0, None
    if policy and config.trains:
        training = training_of(config, gpu=False)  # a GPU stores the same
        saved = planner.saved_bytes(policy.weights, training)
        base = planner.packed_base_bytes(policy.weights, training)
        stored = folders.StoredBytes(planner.checkpoint_bytes(policy.weights, policy.shape, training), saved, base)
    shared = folders.look_at(Path(config.weights.folder).expanduser()) if config.weights.folder else None
    yield from folders.check_folders(
        config, folders.room_of(config, elements, stored), folders.look_at(run_dir), shared
    )
