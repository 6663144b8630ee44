"""plan.apply=auto: choose a run's split between engines and trainer, its lead and its concurrency before it starts;
or take them from a file of asyncrl-plan.

On GPUs of a known kind, speed and memory follow from the model's arithmetic (inputs.py), and the parallel
layouts are chosen, too. On CPUs, processes take the place of GPUs, and their speed is that of the estimate
(estimate.py), from the measured rates of the machine. Answers have `estimate.ANSWER` of their largest length.
What the command line sets is kept, and so is rollout.max_staleness. plan.json in the run folder holds the plan; a
resumed run uses it again, and the summary compares its prediction with the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import config as configuration
from asyncrl import jsonl
from asyncrl.config import Config, cache_tokens, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.extensions.plan import forecast
from asyncrl.extensions.plan.estimate import MachineRates, plan_fields
from asyncrl.extensions.plan.inputs import parse, splits
from asyncrl.extensions.plan.model_splits import HARDWARE
from asyncrl.extensions.plan.report import overrides, report
from asyncrl.extensions.plan.search import NEAR, Choices, GpuSplit, in_play, search
from asyncrl.launch.machine import Gpu, MachineFacts
from asyncrl.launch.placement import Node, imagined, place
from asyncrl.launch.prepare import Preparation
from asyncrl.launch.resume import origins
from asyncrl.settings import require

if TYPE_CHECKING:
    from asyncrl.extensions.cpu.probe import Rates

PLAN = "plan.json"
"""File in the run folder with the plan of a run, and what it predicts."""
LAYOUT = tuple(f"trainer.{name}_parallel" for name in ("tensor", "pipeline", "expert", "expert_tensor", "sequence"))
"""Settings of the trainer's layout: if the command line sets one of them, all are kept."""
PLANNED = (
    "engine.count",
    "engine.tensor_parallel",
    "engine.max_running_requests",
    "engine.max_total_tokens",
    "rollout.lead",
    "rollout.max_running_groups",
    "trainer.data_parallel",
    "trainer.recompute.granularity",
    *LAYOUT,
)
"""Settings that are kept if the command line sets them."""
ENGINE = ("engine.tensor_parallel", "engine.max_running_requests", "engine.max_total_tokens")
"""Overrides of a plan for CPUs that are the configuration's own."""
SHAPE = ("rollout.batch_groups", "rollout.group_size", "rollout.max_staleness")
"""Overrides of a plan that are the run's own."""
ALSO = (
    "cluster.placement",
    "weights.pause_mode",
    "weights.overlap",
    "trainer.batch_parts",
    "trainer.context_parallel",
)
"""Other settings that a plan of asyncrl-plan chooses."""
VALUE = re.compile(r"[A-Za-z0-9_.]+")
"""Values that a plan gives its settings: numbers and words."""
FEW, SEEDS = 3, 2
"""Number of plans that are simulated, and how often each is."""


@dataclass(frozen=True)
class Devices:
    """What a run may use."""

    machines: int = 1
    gpus: int = 0
    """GPUs of each machine; 0: CPUs."""
    gpu: str = ""
    """Kind of the GPUs, as in model_splits.HARDWARE."""
    rates: Rates | None = None
    """Speed of the slowest machine without GPUs."""

    def __str__(self) -> str:
        if self.rates:
            return f"{self.machines * self.rates.cores} cores ({self.rates.cpu})"
        return f"{self.machines * self.gpus} {self.gpu} GPUs"


def plan_run(preparation: Preparation, source: str) -> tuple[Config, RunPlan]:
    """Choose the settings that plan.apply (`source`) leaves to the launcher or a file, as in the run that is resumed,
    and return the run with them, and its plan. Raises ConfigError."""
    config, arguments = preparation.config, preparation.arguments
    preparation.cluster.probe(config)
    plan = recorded(config, preparation.run_dir)
    if not plan and source != "auto":
        plan = of_file(source, arguments)
    elif not plan:
        preparation.find("model")
        hf, folder = preparation.read("model"), preparation.folders["model"]
        plan = make(config, arguments, folder, hf, _devices(preparation, hf))
    return applied(config, plan.overrides, kept(arguments, plan.overrides)), plan


def _devices(preparation: Preparation, hf: dict[str, Any]) -> Devices:
    """Return what the run is planned for: the GPUs of its machines, or their CPUs."""
    cluster = preparation.cluster
    if on_gpu(preparation.config.trainer, max(len(node.gpus) for node in cluster.nodes)):
        return devices_of(cluster.nodes, cluster.machines)
    from asyncrl.extensions.cpu.dtypes import measured

    rates = measured(hf, [node.name for node in cluster.nodes], cluster.everywhere)
    return Devices(len(cluster.nodes), rates=rates)


@dataclass(frozen=True)
class RunPlan:
    """The settings chosen for a run, and what they promise."""

    devices: str
    overrides: list[str]
    prediction: dict[str, Any]
    """The chosen row of asyncrl-plan's JSON."""
    synchronous: float | None = None
    """Samples per second of the synchronous run that uses all devices in turns, where that is possible."""
    kept: list[str] = field(default_factory=list)
    """Settings of the command line."""
    input: dict[str, Any] = field(default_factory=dict)
    """Fields of asyncrl-plan with which the plan was made."""

    def write(self, run_dir: Path) -> None:
        """Write plan.json."""
        jsonl.replace(run_dir / PLAN, asdict(self))

    def lines(self) -> list[str]:
        """Return the plan for the console."""
        row = self.prediction
        kept = f"; set on the command line: {', '.join(self.kept)}" if self.kept else ""
        line = (
            f"plan: {row['samples_per_s']:.3g} samples/s, trainer busy {row['trainer_busy']:.0%}, staleness "
            f"{row['staleness_mean']:.1f}; the {row['binds']} law binds"
        )
        if self.synchronous and self.synchronous >= (1 - NEAR) * row["samples_per_s"]:  # it is on-policy
            line += f"; cluster.placement=colocated, synchronous: {self.synchronous:.3g} samples/s"
        return [f"plan for {self.devices}: {' '.join(self.overrides)}{kept}", line]


def kept(arguments: Sequence[str], words: Sequence[str] = ()) -> set[str]:
    """Return the settings of a plan that a command line sets, by themselves or in a mapping (engine={count: 2}): those
    of PLANNED, and of the overrides `words`. A choice of a group, as engine=sglang, sets none."""
    pairs = [word.lstrip("+").partition("=") for word in arguments]
    names = [name for name, _, value in pairs if "." in name or value.startswith("{")]
    planned = {*PLANNED, *(word.partition("=")[0] for word in words)}
    found = {one for one in planned if any(one == name or one.startswith(f"{name}.") for name in names)}
    return found | set(LAYOUT) if found & set(LAYOUT) else found


def recorded(config: Config, run_dir: Path) -> RunPlan | None:
    """Return the plan of the run that is resumed; None if there is none."""
    found = next((one / PLAN for one in origins(config, run_dir) if (one / PLAN).is_file()), None)
    if found is None:
        return None
    try:
        plan = RunPlan(**json.loads(found.read_text()))
        _check_names(plan.overrides)
        return plan
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError("resume", config.resume, f"{found} is not the plan of a run ({error}): delete it.") from None


def _check_names(words: Sequence[str]) -> None:
    """Raise ValueError for an override of a setting that plans do not choose: a plan may come from somebody else."""
    for word in words:
        name, _, value = word.partition("=")
        if name not in {*PLANNED, *SHAPE, *ALSO}:
            raise ValueError(f"it sets {name}, which no plan chooses")
        if not VALUE.fullmatch(value):
            raise ValueError(f"it sets {name} to {value!r}, which no plan would")


def of_file(path: str, arguments: Sequence[str] = ()) -> RunPlan:
    """Return the plan that `asyncrl-plan --json` wrote, without what the command line sets."""
    try:
        found = json.loads(Path(path).expanduser().read_text())
        _check_names(found["overrides"])
        turns, keep = found["synchronous_is_better"], kept(arguments, found["overrides"])
        return RunPlan(
            f"{found['input']['gpus']} GPUs ({path})",
            [word for word in found["overrides"] if word.partition("=")[0] not in keep],
            found["colocated" if turns else "best"],
            found["colocated"]["samples_per_s"] if found["colocated"] and not turns else None,
            sorted(keep),
            found["input"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"Set auto, or name a file that asyncrl-plan --json wrote ({type(error).__name__}: {error})."
        raise ConfigError("plan.apply", path, remedy) from None


def applied(config: Config, words: Sequence[str], keep: Collection[str]) -> Config:
    """Return the configuration with these overrides, except for fields to keep. Raises ConfigError if they are
    invalid."""
    import yaml

    values = json.loads(config.model_dump_json())
    for word in words:
        name, _, value = word.partition("=")
        if name not in keep:
            *path, last = name.split(".")
            section = values
            for part in path:
                section = section[part]
            section[last] = yaml.safe_load(value)
    return configuration.load(values)


def devices_of(nodes: Sequence[Node], machines: Sequence[MachineFacts]) -> Devices:
    """Return the GPUs of the run's machines; `machines` has the facts about each of `nodes`. Raises ConfigError for
    GPUs of an unknown kind, or of several."""
    gpus = [gpu for node, facts in zip(nodes, machines, strict=True) for gpu in facts.visible(node.gpus)]
    return Devices(len(nodes), min(len(node.gpus) for node in nodes if node.gpus), _kind(gpus))


def _kind(gpus: Sequence[Gpu]) -> str:
    found = {
        next((name for name, one in HARDWARE.items() if name in gpu.name.lower() and gpu.memory > 0.9 * one.memory), "")
        for gpu in gpus
    }
    if len(found) != 1 or "" in found:
        names = ", ".join(sorted({gpu.name for gpu in gpus})) or "no GPU that nvidia-smi lists"
        remedy = f"The machines have {names}; known are {', '.join(HARDWARE)}: use asyncrl-plan with typed numbers."
        raise ConfigError("plan.apply", "auto", remedy)
    return found.pop()


def make(config: Config, arguments: Sequence[str], folder: Path, hf: dict[str, Any], devices: Devices) -> RunPlan:
    """Choose the plan of a run. `folder` is that of the model, `hf` its config.json. Raises ConfigError if the run
    cannot be planned, or if no plan obeys the settings of the command line."""
    _check(config, devices)
    keep = kept(arguments)
    fields = _on_gpus(config, keep, folder, devices) if devices.gpus else _on_cpus(config, keep, folder, hf, devices)
    try:
        given = parse(fields)
        possible = [
            one
            for one in splits(given, () if devices.gpus else ENGINE)
            if one.colocated or _fits(one, config, keep, devices)
        ]
    except ConfigError as error:  # its fields are those of asyncrl-plan
        raise ConfigError("plan.apply", "auto", f"On {devices}: {error}") from None
    if all(one.colocated for one in possible):
        settings = f", and obeys {', '.join(sorted(keep))}" if keep else ""
        raise ConfigError("plan.apply", "auto", f"No split of {devices} fits the machines{settings}: set less.")
    found = search(possible, given.workload, _choices(config, keep), few=FEW, seeds=SEEDS)
    words = {one.partition("=")[0]: one for one in overrides(found.best)}
    return RunPlan(
        str(devices),
        [word for name, word in words.items() if name not in {*keep, *SHAPE}],
        report(found, given)["best"],
        found.colocated.rate if found.colocated else None,
        [name for name in words if name in keep],
        fields,
    )


def _check(config: Config, devices: Devices) -> None:
    """Refuse what is not planned."""
    cluster, engine = config.cluster, config.engine
    mixed = on_gpu(config.trainer, devices.gpus) != on_gpu(engine, devices.gpus)
    remedy = "plan.apply=auto does not plan this: leave plan.apply unset."
    rules = (
        ("mode", config.mode != "train"),
        ("engine.urls", bool(engine.urls)),
        ("engine.pipeline_parallel", engine.ranks != engine.tensor_parallel),
        ("cluster.placement", cluster.placement != "separate"),
        ("cluster.trainer_nodes", cluster.trainer_nodes is not None),
        ("trainer.context_parallel", config.trainer.context_parallel > 1),
        ("engine.device", mixed or on_gpu(engine, devices.gpus) != bool(devices.gpus)),
    )
    require(config, ((field, broken, remedy) for field, broken in rules))


def _fits(split: GpuSplit, config: Config, keep: Collection[str], devices: Devices) -> bool:
    """Return whether a split obeys the settings to keep, and stands on the machines."""
    words = (f"engine.count={split.engines}", *split.overrides)
    try:
        planned = applied(config, words, keep)
        place(planned, imagined(planned, devices.machines, devices.gpus))
    except ConfigError:
        return False
    engine = planned.engine
    sizes = engine.started, engine.ranks, planned.trainer.world_size
    return sizes == (split.engines, split.engine_gpus, split.trainers)


def _choices(config: Config, keep: Collection[str]) -> Choices:
    rollout = config.rollout
    limit = in_play(rollout.max_running_groups, rollout.group_size)
    return Choices(
        (rollout.max_staleness,),
        (rollout.effective_lead,) if "rollout.lead" in keep else (),
        (limit,) if "rollout.max_running_groups" in keep else (),
    )


def _batch(config: Config, keep: Collection[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the fields of PlanInput that do not depend on the devices."""
    work, rollout, engine, trainer = forecast.workload(config, folder), config.rollout, config.engine, config.trainer
    yield from (("batch_groups", rollout.batch_groups), ("group_size", round(work.group_size)))
    yield from (("batch_parts", trainer.batch_parts), ("overlap", config.weights.overlap))
    yield from (("mean", work.answer), ("longest", rollout.max_new_tokens))
    yield "prompt", work.beginning + work.question
    if "engine.count" in keep:
        yield "engines", engine.started
    if "engine.max_running_requests" in keep:
        yield "max_running", engine.max_running_requests
    if "engine.max_total_tokens" in keep and engine.max_total_tokens:
        yield "kv_tokens", engine.max_total_tokens
    if "engine.tensor_parallel" in keep:
        yield "engine_gpus", engine.ranks
    if LAYOUT[0] in keep:
        yield "layout", [trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel]


def _on_gpus(config: Config, keep: Collection[str], folder: Path, devices: Devices) -> dict[str, Any]:
    others = [(one.started, one.tensor_parallel) for one in config.frozen.values() if on_gpu(one, devices.gpus)]
    working = devices.machines - config.cluster.cpu_nodes
    gpus = working * devices.gpus - sum(count * each for count, each in others)
    return {"gpus": gpus, "gpu": devices.gpu, "model": str(folder), **dict(_batch(config, keep, folder))}


def _on_cpus(
    config: Config, keep: Collection[str], folder: Path, hf: dict[str, Any], devices: Devices
) -> dict[str, Any]:
    """Return the fields for processes on CPUs: as many as cores, less one for the rollout process if there are more
    than two; more only if the command line says so. Layouts are the configuration's."""
    assert devices.rates
    rates, engine, trainer = devices.rates, config.engine, config.trainer
    copy, cores = trainer.world_size // trainer.data_parallel, devices.machines * rates.cores
    engines = engine.count if "engine.count" in keep else 1
    trainers = trainer.world_size if "trainer.data_parallel" in keep else copy
    processes = max(cores - (cores > 2), engines * engine.ranks + trainers)
    machine = MachineRates(
        train=rates.train.get(trainer.dtype) or max(rates.train.values()),  # auto: the faster dtype
        generate=rates.generate.get(engine.dtype) or max(rates.generate.values()),
        trainers=processes - 1,
        engines=1,
        cores=cores,
        two=rates.two,
    )
    fields = plan_fields(forecast.model_size(config, folder, hf), forecast.workload(config, folder), machine)
    return {
        **dict(_batch(config, keep, folder)),
        **fields,
        "gpus": processes,
        "engine_gpus": engine.ranks,
        "trainer_gpus": copy,
        "switch": 0.0,  # without GPUs no memory changes hands
        "max_running": engine.max_running_requests,
        "kv_tokens": cache_tokens(engine, gpu=False),
        **({"trainers": trainers} if "trainer.data_parallel" in keep else {}),
    }
