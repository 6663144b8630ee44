"""The preflight of a run: all checks, ordered so that each failure explains later ones: settings, versions, model,
machines, folders and network.

A job that has not been submitted has no machines yet: placeholders stand in for them, and checks that need the machines
are skipped.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config import Config, on_gpu
from asyncrl.envs.sandbox import local
from asyncrl.envs.sandbox.local import LocalSandboxes
from asyncrl.envs.sandbox.protections import Protections
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.launch import forecast, precision
from asyncrl.launch.attached import attached_dtype, check_attached, run_key
from asyncrl.launch.checks import check_devices, check_files, check_model, check_sandboxes
from asyncrl.launch.machine import count_gpus, this_node
from asyncrl.launch.placement import Node, Placement, imagined, nodes_wanted, place, ports_wanted
from asyncrl.launch.preflight import folders, network
from asyncrl.launch.preflight.devices import check_gpus
from asyncrl.launch.preflight.facts import MachineFacts, this_machine
from asyncrl.launch.preflight.findings import Finding, error, failed, ok, refused, rendered, warning
from asyncrl.launch.preflight.memory import MemoryNeed, check_memory
from asyncrl.launch.preflight.model_files import check_model_files, read_model
from asyncrl.launch.preflight.shapes import layout_of, shape_of, training_of
from asyncrl.launch.preflight.versions import check_versions, installed, pinned
from asyncrl.launch.preflight.weights import check_shared, check_sync
from asyncrl.launch.replay import check_recording
from asyncrl.launch.slurm.job import SlurmJob
from asyncrl.models import catalog
from asyncrl.planner import memory as planner
from asyncrl.planner.estimate import Estimate
from asyncrl.planner.memory import Shape, Weight


@dataclass(frozen=True)
class ModelFolder:
    """A complete model folder."""

    hf: dict[str, Any]
    """Contents of config.json."""
    weights: list[Weight]
    shape: Shape


@dataclass
class ClusterFacts:
    """Known facts about the machines, and the placement of the run on them."""

    nodes: Sequence[Node] = ()
    machines: Sequence[MachineFacts] = ()
    imagined: bool = False
    placement: Placement | None = None

    @property
    def gpus(self) -> int:
        """Return the number of GPUs per machine, as addresses.json will have it."""
        return max((len(node.gpus) for node in self.nodes), default=0)


def preflight(config: Config, run_dir: Path, job: SlurmJob | None = None) -> list[Finding]:
    """Run all checks that are possible before anything is started. `job` has been probed; None means this machine, or a
    job that has not started."""
    return list(_all(config, run_dir, job))


def require(config: Config, run_dir: Path, job: SlurmJob | None = None) -> None:
    """Run and print the preflight. Raises LaunchError if the run would fail."""
    findings = preflight(config, run_dir, job)
    print(rendered(findings), flush=True)
    if failed(findings):
        names = ", ".join(dict.fromkeys(one.field for one in findings if one.level == "error"))
        raise LaunchError(f"Preflight failed: {names} (cluster.preflight)")


def _all(config: Config, run_dir: Path, job: SlurmJob | None) -> Iterator[Finding]:
    sandboxes: list[LocalSandboxes] = []
    yield from refused(lambda: sandboxes.extend(check_files(config)), "task")
    yield from refused(partial(check_recording, config), "replay.from")
    yield from refused(partial(check_attached, config, run_key(config)), "engine.urls")
    seen = ClusterFacts()
    problems = refused(partial(_look, config, job, seen), "cluster")
    yield from problems
    yield from _isolation(config, sandboxes, seen)
    yield from check_versions(seen.machines or [this_machine("", installed())], pinned())
    models: dict[str, ModelFolder] = {}
    there: dict[str, Path] = {}
    choices: list[precision.Precision] = []
    for name, role in (("model.path", "model"), ("teacher.model", "teacher"), ("judge.model", "judge")):
        yield from _model(config, name, role, models, there)
    if not problems:
        chosen = precision.Precision(precision.assumed(config, seen.gpus))
        if not seen.imagined:
            yield from refused(lambda: choices.append(_precision(config, run_dir, job, seen, models)), "trainer.dtype")
            chosen = choices[0] if choices else chosen
        yield from _told(config, chosen, models, there, seen)
        config = chosen.config
        yield from _on_machines(config, seen, models)
    policy = models.get("model")
    yield from _folders(config, run_dir, policy)
    if job and len(job.nodes) > 1 and seen.placement:
        yield from _network(config, run_dir, job, seen.placement, there)


# -- the machines ------------------------------------------------------------------------------------------


def _look(config: Config, job: SlurmJob | None, seen: ClusterFacts) -> None:
    """Find the machines and place the run on them. Raises ConfigError."""
    cluster = config.cluster
    if job:
        seen.nodes, seen.machines = job.nodes, job.machines
    elif cluster.launcher == "slurm":
        if cluster.gpus is None:
            raise ConfigError(
                "cluster.gpus", None, "Required for a job: the number of GPUs of each machine, 0 for none."
            )
        seen.imagined = True
        seen.nodes = imagined(config, cluster.nodes or nodes_wanted(config, cluster.gpus), cluster.gpus)
    else:
        seen.machines = [this_machine("", installed())]
        gpus = count_gpus(cluster.gpus)
        seen.nodes = [this_node(cluster.host, cluster.interface, gpus, ports_wanted(config))]
        check_devices(config, gpus)
    seen.placement = place(config, seen.nodes)


def _isolation(config: Config, sandboxes: Sequence[LocalSandboxes], seen: ClusterFacts) -> Iterator[Finding]:
    """Check how a machine is protected from code that the model writes."""
    if not sandboxes or config.mode == "replay":
        return
    if seen.imagined:
        yield ok("sandbox", "checked on the job's machines when it starts")
        return
    found: list[Protections] = []
    yield from refused(lambda: found.extend(check_sandboxes(sandboxes)), "sandbox")
    for one in found:
        held = f"{one.kind}: {', '.join(one.holds)} protected"
        lacks = "; ".join(f"{name} not: {instead}" for name, instead in one.lacks.items())
        if one.isolated:
            yield ok("sandbox", f"{held}; {lacks}" if lacks else held)
        else:
            text = f"no isolation (allow_unsafe=true), little more than resource limits; {held}; {lacks}"
            yield warning("sandbox", text, f"{local.FOR_ISOLATION}.")


def _on_machines(config: Config, seen: ClusterFacts, models: dict[str, ModelFolder]) -> Iterator[Finding]:
    placement = seen.placement
    assert placement
    if seen.imagined:
        yield ok("cluster.launcher", f"a job of {len(seen.nodes)} machine(s): its machines are checked when it starts")
    else:
        yield from check_gpus(seen.nodes, seen.machines)
        yield from network.check_ports(seen.nodes, ports_wanted(config))
    needs = _needs(config, seen, models)
    machines = {node.name: machine for node, machine in zip(seen.nodes, seen.machines, strict=False)}
    yield from check_memory(placement, needs, machines)
    if policy := models.get("model"):
        yield from check_sync(config, placement, policy.weights, seen.gpus)


def _precision(
    config: Config, run_dir: Path, job: SlurmJob | None, seen: ClusterFacts, models: dict[str, ModelFolder]
) -> precision.Precision:
    """Resolve every dtype on the machines that will run the part."""
    assert seen.placement
    roles = {"trainer": "model", "engine": "model", "teacher": "teacher", "judge": "judge"}
    configs = {part: models[role].hf for part, role in roles.items() if role in models}
    before = precision.recorded(config, run_dir)
    attached = attached_dtype(config, run_key(config))
    return precision.resolve(config, configs, seen.placement, seen.gpus, job=job, before=before, attached=attached)


def _told(
    config: Config,
    chosen: precision.Precision,
    models: dict[str, ModelFolder],
    there: dict[str, Path],
    seen: ClusterFacts,
) -> Iterator[Finding]:
    """Report the number format of each part, and the estimated duration of the run."""
    for part in ("trainer", "engine") if seen.imagined else ():
        section = getattr(config, part)
        if section.dtype == precision.AUTO:
            later = "auto: decided by the job's machines when it starts"
            yield ok(f"{part}.dtype", "bfloat16, auto: it runs on GPUs" if on_gpu(section, seen.gpus) else later)
    for choice in chosen.choices:
        text = f"{choice.dtype}, {choice.why}"
        yield warning(choice.field, text, choice.remedy) if choice.remedy else ok(choice.field, text)
    found: list[Estimate | None] = []
    if "model" in models:
        folder, hf = there["model.path"], models["model"].hf
        yield from refused(lambda: found.append(forecast.forecast(chosen.config, folder, hf, chosen)), "task")
    for expected in filter(None, found):
        yield ok("run.max_steps", f"{config.run.max_steps} steps; estimate: {forecast.summary_of(expected)}")


def _needs(config: Config, seen: ClusterFacts, models: dict[str, ModelFolder]) -> dict[str, MemoryNeed]:
    """Return the memory needs of each role."""
    needs: dict[str, MemoryNeed] = {}
    if (policy := models.get("model")) and config.mode != "rollout_only":
        gpu = on_gpu(config.trainer, seen.gpus)
        layout, training = layout_of(config.trainer), training_of(config, gpu=gpu)
        staged = 0
        if config.checkpoint.every:
            staged = planner.checkpoint_staging(policy.weights, policy.shape, layout, critic=training.critic)
        parts = planner.trainer_rank(policy.weights, policy.shape, layout, training)
        needs["trainer"] = MemoryNeed(parts, gpu, staged)
    for name, section, model in (
        ("engine", config.engine, policy),
        ("teacher", config.teacher, models.get("teacher")),
        ("judge", config.judge, models.get("judge")),
    ):
        if model:
            parts = planner.engine_rank(
                model.weights,
                model.shape,
                tensor=section.tensor_parallel,
                dtype=section.dtype,
                tokens=section.max_total_tokens,
                cache_dtype=str(section.server_args.get("kv_cache_dtype") or ""),
            )
            needs[name] = MemoryNeed(parts, on_gpu(section, seen.gpus))
    return needs


# -- model, folders, network -------------------------------------------------------------------------------


def _model(
    config: Config, name: str, role: str, models: dict[str, ModelFolder], there: dict[str, Path]
) -> Iterator[Finding]:
    """Check a model folder and record its path in `there`; a built-in model is created first. Teacher and judge are
    only checked if this run starts them. For a family that the trainer does not know, only the files are checked."""
    section = getattr(config, role)
    path = config.model.path if role == "model" else section.model
    if not path or (role != "model" and not section.started):
        return
    yield from refused(lambda: there.update({name: catalog.resolve(path, name)}), name)
    if name not in there:
        return
    files = read_model(there[name], name)
    yield from check_model_files(there[name], files, name)
    if files.problems:
        return
    hf = json.loads((there[name] / "config.json").read_text())
    if role == "model":
        problems = refused(partial(check_model, config, hf), name)
        yield from problems
        if problems:
            return
    try:
        shape = shape_of(hf)
    except (ConfigError, KeyError):
        return
    models[role] = ModelFolder(hf, planner.counted(files.weights, shape), shape)


def _folders(config: Config, run_dir: Path, policy: ModelFolder | None) -> Iterator[Finding]:
    elements = planner.parameters(policy.weights).all if policy else 0
    shared = folders.look_at(Path(config.weights.folder).expanduser()) if config.weights.folder else None
    yield from folders.check_folders(config, folders.room_of(config, elements), folders.look_at(run_dir), shared)


def _network(
    config: Config, run_dir: Path, job: SlurmJob, placement: Placement, models: dict[str, Path]
) -> Iterator[Finding]:
    """Check the network between the machines of a job. `models` maps the settings to the model folders."""
    shared = Path(config.weights.folder).expanduser() if config.weights.folder else run_dir
    nearest = {path: next(one for one in (path, *path.parents) if one.is_dir()) for path in (run_dir, shared)}
    try:
        reach, answers = network.ask_reach(job, set(nearest.values()), models.values(), secrets.token_hex(4))
        reached = network.check_reach(reach, answers)
        yield from reached
        named = {str(folder): name for name, folder in models.items()}
        yield from check_shared(config, network.unseen(answers), str(nearest[shared]), named)
        machines = {seat.node.name for seat in placement.trainers}
        if len(machines) > 1 and not failed(reached):  # the all-reduce would only run into its timeout
            gpu = on_gpu(config.trainer, max(len(node.gpus) for node in job.nodes))
            yield from network.check_allreduce(*network.ask_allreduce(job, placement, gpu=gpu))
    except LaunchError as problem:
        yield error("cluster", str(problem), "See srun's output.")
