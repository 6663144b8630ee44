"""The preflight of a run: all checks, ordered so that each failure explains later ones: settings, versions, model,
machines, folders and network.

A job that has not been submitted has no machines yet: placeholders stand in for them, and checks that need the machines
are skipped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config import Config, cache_tokens, on_gpu
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extension import linear_bytes
from asyncrl.launch import forecast, precision
from asyncrl.launch.checks import check_model
from asyncrl.launch.leftovers import SHARED
from asyncrl.launch.machine import allow_files
from asyncrl.launch.placement import ports_wanted
from asyncrl.launch.preflight import folders, network
from asyncrl.launch.preflight.devices import check_gpus, check_idle
from asyncrl.launch.preflight.facts import MachineFacts, this_machine
from asyncrl.launch.preflight.findings import Finding, error, failed, ok, refused, rendered, warning
from asyncrl.launch.preflight.memory import MemoryNeed, check_memory, in_turns
from asyncrl.launch.preflight.model_files import check_model_files, read_model
from asyncrl.launch.preflight.versions import (
    check_gpu_engines,
    check_gpu_trainers,
    check_versions,
    installed,
    pinned,
)
from asyncrl.launch.preflight.weights import check_shared, check_sync
from asyncrl.launch.prepare import ROLES, Preparation
from asyncrl.launch.run_folder import SHARED_REMEDY, full
from asyncrl.launch.teacher import check_teacher
from asyncrl.planner import memory as planner
from asyncrl.planner.settings import layout_of, served_adapters, training_of
from asyncrl.planner.shapes import Shape, Weight, counted, parameters, shape_of
from asyncrl.weights.choice import choose_lora


@dataclass(frozen=True)
class ModelFolder:
    """A complete model folder."""

    weights: list[Weight]
    shape: Shape


def preflight(prepared: Preparation, run_dir: Path) -> list[Finding]:
    """Take the steps of the preparation, and run all checks that are possible before anything is started."""
    return list(dict.fromkeys(_all(prepared, run_dir)))  # several steps may build the tasks and be refused alike


def require(prepared: Preparation, run_dir: Path) -> None:
    """Run and print the preflight. Raises LaunchError if the run would fail."""
    findings = preflight(prepared, run_dir)
    print(rendered(findings), flush=True)
    if failed(findings):
        names = ", ".join(dict.fromkeys(one.field for one in findings if one.level == "error"))
        raise LaunchError(f"Preflight failed: {names} (cluster.preflight)")


def _all(prepared: Preparation, run_dir: Path) -> Iterator[Finding]:
    yield from refused(prepared.files, "task")
    recording = refused(prepared.recording, "replay.from")
    yield from recording
    yield from refused(prepared.attached, "engine.urls")
    yield from refused(prepared.plan, "cluster.plan")
    yield from (ok("cluster.plan", line) for line in (prepared.planned.lines() if prepared.planned else ()))
    yield from refused(prepared.place, "cluster")
    config = prepared.config
    if not prepared.imagined:
        yield from refused(allow_files, "ulimit -n")
        yield from (error(str(SHARED), problem, f"Or {SHARED_REMEDY}.") for problem in full([SHARED]))
    yield from check_versions(prepared.machines or [this_machine("", installed())], pinned())
    models: dict[str, ModelFolder] = {}
    for role in ROLES:
        yield from _model(prepared, role, models)
    if {"model", "teacher"} <= prepared.hf.keys():
        folders_of_both = prepared.folders["model"], prepared.folders["teacher"]
        yield from refused(partial(check_teacher, config, *folders_of_both), "teacher.model")
    if "model" in models and not recording:
        yield from refused(prepared.vocabulary, "model.path")
    yield from refused(prepared.choose_checkpoint, "resume")
    assumed = precision.assumed(config, prepared.gpus)
    if config.weights.lora == "auto" and "model" in prepared.hf:
        assumed, _ = choose_lora(assumed, prepared.hf["model"], prepared.gpus)
    prepared.chosen = precision.Precision(assumed)
    if prepared.is_placed:
        yield from _precision(prepared, models)
        yield from _on_machines(prepared, models)
    policy = models.get("model")
    yield from _folders(prepared.chosen.config, run_dir, policy)
    if len(prepared.cluster.nodes) > 1 and prepared.is_placed:
        yield from _network(prepared, run_dir)
    for hooks in prepared.hooks:
        yield from hooks.preflight(prepared)


# -- the machines ------------------------------------------------------------------------------------------


def _on_machines(prepared: Preparation, models: dict[str, ModelFolder]) -> Iterator[Finding]:
    config, machines = prepared.chosen.config, prepared.machines
    if prepared.imagined:
        text = f"a job of {len(prepared.nodes)} machine(s): its machines are checked when it starts"
        yield ok("cluster.launcher", text)
    else:
        yield from check_gpus(prepared.nodes, machines)
        yield from network.check_ports(prepared.nodes, ports_wanted(config))
    if not config.cluster.is_local:
        yield from check_idle(prepared.nodes, prepared.placement)
    needs = _needs(config, prepared.gpus, models)
    known = {node.name: machine for node, machine in zip(prepared.nodes, machines, strict=False)}
    yield from _gpu_software(config, prepared, models, known)
    yield from check_memory(prepared.placement, needs, known)
    if policy := models.get("model"):
        yield from check_sync(config, prepared.placement, policy.weights, prepared.gpus)


def _gpu_software(
    config: Config, prepared: Preparation, models: dict[str, ModelFolder], known: Mapping[str, MachineFacts]
) -> Iterator[Finding]:
    """Check the packages and the compiler that only parts on GPUs need, on the machines of these parts."""
    placed, pins = prepared.placement, pinned(gpu=True)
    fleets = (
        (config.engine, [seat for seats in placed.engines for seat in seats]),
        (config.teacher, placed.teachers),
        (config.judge, placed.judges),
    )
    serving = dict.fromkeys(
        seat.node.name for section, seats in fleets if on_gpu(section, prepared.gpus) for seat in seats
    )
    yield from check_gpu_engines([known[name] for name in serving if name in known], pins)
    if on_gpu(config.trainer, prepared.gpus) and (policy := models.get("model")):
        training = dict.fromkeys(seat.node.name for seat in placed.trainers)
        machines = [known[name] for name in training if name in known]
        yield from check_gpu_trainers(machines, pins, experts=bool(policy.shape.sparse))


def _precision(prepared: Preparation, models: dict[str, ModelFolder]) -> Iterator[Finding]:
    """Report the number format of each part, and the estimated duration of the run."""
    config = prepared.config
    if not prepared.imagined:
        yield from refused(prepared.precision, "trainer.dtype")
    for part in ("trainer", "engine") if prepared.imagined else ():
        section = getattr(config, part)
        if section.dtype == precision.AUTO:
            later = "auto: decided by the job's machines when it starts"
            yield ok(f"{part}.dtype", "bfloat16, auto: it runs on GPUs" if on_gpu(section, prepared.gpus) else later)
    for choice in prepared.chosen.choices:
        text = f"{choice.dtype}, {choice.why}"
        yield warning(choice.field, text, choice.remedy) if choice.remedy else ok(choice.field, text)
    if prepared.lora:
        yield ok("weights.lora", prepared.lora)
    if "model" in models:
        yield from refused(prepared.estimate, "task")
    if prepared.expected:
        text = f"{config.run.max_steps} steps; estimate: {forecast.summary_of(prepared.expected)}"
        yield ok("run.max_steps", text)


def _needs(config: Config, gpus: int, models: dict[str, ModelFolder]) -> dict[str, MemoryNeed]:
    """Return the memory needs of each role."""
    needs: dict[str, MemoryNeed] = {}
    if (policy := models.get("model")) and config.mode != "rollout_only":
        gpu = on_gpu(config.trainer, gpus)
        layout, training = layout_of(config.trainer), training_of(config, gpu=gpu)
        staged = planner.offloaded(policy.weights, policy.shape, layout, training)
        if config.checkpoint.every:
            staged += planner.checkpoint_staging(policy.weights, policy.shape, layout, training)
        parts = planner.trainer_rank(policy.weights, policy.shape, layout, training)
        needs["trainer"] = MemoryNeed(parts, gpu, staged, config.trainer_fraction)
    for name, section, model in (
        ("engine", config.engine, policy),
        ("teacher", config.teacher, models.get("teacher")),
        ("judge", config.judge, models.get("judge")),
    ):
        if model:
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
    if config.cluster.takes_turns and needs.keys() >= {"trainer", "engine"} and needs["engine"].gpu:
        needs["trainer"] = in_turns(needs["trainer"], needs["engine"])
    return needs


def _divided(config: Config) -> dict[str, Any]:
    """Return what else divides or fills the memory of an engine."""
    engine = config.engine
    divided = {"replicas": engine.data_parallel, "stages": engine.pipeline_parallel}
    return {**divided, "linear_bytes": linear_bytes(config), **served_adapters(config)}


# -- model, folders, network -------------------------------------------------------------------------------


def _model(prepared: Preparation, role: str, models: dict[str, ModelFolder]) -> Iterator[Finding]:
    """Check a model folder. The files of teacher and judge are only checked if this run starts them. For a family that
    the trainer does not know, only the files are checked."""
    field = "model.path" if role == "model" else f"{role}.model"
    yield from refused(partial(prepared.find, role), field)
    if role not in prepared.folders:
        return
    if role != "model" and not getattr(prepared.config, role).started:
        yield from refused(partial(prepared.read, role), field)
        return
    folder = prepared.folders[role]
    files = read_model(folder, field)
    yield from check_model_files(folder, files, field)
    if files.problems:
        return
    hf = prepared.read(role)
    if role == "model":
        problems = refused(partial(check_model, prepared.config, hf), field)
        yield from problems
        if problems:
            return
    try:
        shape = shape_of(hf)
    except (ConfigError, KeyError):
        return
    models[role] = ModelFolder(counted(files.weights, shape), shape)


def _folders(config: Config, run_dir: Path, policy: ModelFolder | None) -> Iterator[Finding]:
    elements, stored = parameters(policy.weights).all if policy else 0, None
    if policy and config.mode != "rollout_only":
        training = training_of(config, gpu=False)  # a GPU stores the same
        saved = planner.saved_bytes(policy.weights, training)
        base = planner.packed_base_bytes(policy.weights, training)
        stored = folders.StoredBytes(planner.checkpoint_bytes(policy.weights, policy.shape, training), saved, base)
    shared = folders.look_at(Path(config.weights.folder).expanduser()) if config.weights.folder else None
    yield from folders.check_folders(
        config, folders.room_of(config, elements, stored), folders.look_at(run_dir), shared
    )


def _network(prepared: Preparation, run_dir: Path) -> Iterator[Finding]:
    """Check the network between the machines of a job."""
    config, placement, cluster = prepared.config, prepared.placement, prepared.cluster
    names = {"model": "model.path", "teacher": "teacher.model", "judge": "judge.model"}
    models = {names[role]: folder for role, folder in prepared.folders.items()}
    shared = Path(config.weights.folder).expanduser() if config.weights.folder else run_dir
    nearest = {path: next(one for one in (path, *path.parents) if one.is_dir()) for path in (run_dir, shared)}
    try:
        reach, answers = network.ask_reach(cluster, set(nearest.values()), models.values(), secrets.token_hex(4))
        reached = network.check_reach(reach, answers)
        yield from reached
        named = {str(folder): name for name, folder in models.items()}
        yield from check_shared(config, network.unseen(answers), str(nearest[shared]), named)
        machines = {seat.node.name for seat in placement.trainers}
        if len(machines) > 1 and not failed(reached):  # the all-reduce would only run into its timeout
            gpu = on_gpu(config.trainer, max(len(node.gpus) for node in cluster.nodes))
            yield from network.check_allreduce(*network.ask_allreduce(cluster, placement, gpu=gpu))
    except LaunchError as problem:
        yield error("cluster", str(problem), "See what the machines printed.")
