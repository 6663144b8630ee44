"""Resolution of what a run leaves to its machines: the format of numbers (`dtype: auto` of trainer, engines, and models
that are not trained), and the trainer's layers.

On a GPU the dtype becomes bfloat16; elsewhere the platform chooses (Platform.choose). A run that is resumed or replayed
keeps its formats, and its layers: TransformerEngine's round differently from Megatron's own. The launcher writes the
result to config.json, which every process reads, and the reasons to machine.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl import lookup
from asyncrl.config import Config, on_gpu
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Placement
from asyncrl.launch.resume import origins
from asyncrl.platforms import without_gpu
from asyncrl.settings import Rule, require

AUTO = "auto"
TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
PACKAGES = ("transformer_engine", "transformer_engine_torch")
"""TransformerEngine's Python modules, and its compiled extension."""


@dataclass(frozen=True)
class DtypeChoice:
    """The number format of one part, and the reason."""

    part: str
    dtype: str
    why: str
    rates: Any = None
    """What the platform has measured; None on GPUs, and if nothing was measured."""
    remedy: str = ""
    """What to do about an explicit dtype that is slow."""

    @property
    def field(self) -> str:
        """Return the name of the setting."""
        return f"{self.part}.dtype"

    def line(self) -> str:
        """Return a line for the console."""
        return f"{self.field} {self.dtype}: {self.why}" + (f". {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Precision:
    """The configuration with every dtype resolved, and the reasons."""

    config: Config
    choices: list[DtypeChoice] = field(default_factory=list)


def sections(config: Config) -> list[str]:
    """Return the sections with a dtype."""
    return ["trainer", "engine", *config.frozen]


def resolve(
    config: Config,
    models: Mapping[str, Any],
    placement: Placement,
    gpus: int,
    cluster: Cluster,
    *,
    before: dict[str, Any] | None = None,
    given: Mapping[str, tuple[str, str]] | None = None,
) -> Precision:
    """Resolve every `auto` and explain the choice. `models` maps each part to its model's config.json, `before` is the
    resolved configuration of the run that is resumed or replayed, `given` what extensions know (LaunchHooks.formats).
    Raises LaunchError if a machine cannot be measured."""
    trained, started = ["trainer"] * config.trains, ["engine"] * config.generates
    frozen = [role for role, section in config.frozen.items() if section.started]
    parts = [part for part in (*trained, *started, *frozen) if part in models]
    choices = [_settled(config, part, gpus, before or {}, given or {}) for part in parts]
    if slow := [one for one in choices if not on_gpu(getattr(config, one.part), gpus)]:
        machines = {one.part: _machines(placement, one.part) for one in slow}
        chosen = without_gpu().choose(config, slow, models, machines, cluster.everywhere)
        by_part = {one.part: one for one in (*choices, *chosen)}
        choices = [by_part[part] for part in parts]
    return Precision(assumed(config, gpus, {choice.part: choice.dtype for choice in choices}), choices)


def resolve_layers(config: Config, gpus: int, before: dict[str, Any] | None = None) -> Config:
    """Return the configuration with the trainer's layers resolved. `gpus` is the number of GPUs of a machine, `before`
    the resolved configuration of the run that is resumed or replayed. Raises ConfigError if the machine cannot run
    them."""
    trainer = config.trainer
    layers: str = trainer.layers
    if layers == AUTO and before is not None:
        layers = before.get("trainer", {}).get("layers", LOCAL)  # runs without this setting had the local ones
    trains = config.trains
    problem = _problem(on_gpu(trainer, gpus)) if trains else None
    if layers == AUTO:
        layers = TRANSFORMER_ENGINE if trains and not problem else LOCAL
    if trains:
        require(config, _layer_rules(config, layers, problem))
    return config.model_copy(update={"trainer": trainer.model_copy(update={"layers": layers})})


def _layer_rules(config: Config, layers: str, problem: str | None) -> Iterator[Rule]:
    """Yield the rules of these layers; `problem` says why TransformerEngine's cannot run."""
    trainer, fused = config.trainer, layers == TRANSFORMER_ENGINE
    yield "trainer.layers", layers, fused and bool(problem), f"{problem}, or set local."
    scaled = trainer.fp8.format if trainer.fp8 else None
    why = f"Only layers of TransformerEngine have it ({problem or 'trainer.layers=local'}): set fp8=null."
    yield "trainer.fp8", scaled, scaled is not None and not fused, why
    rounded = trainer.optimizer.moments_dtype != "float32"
    why = f"Only TransformerEngine's FusedAdam has such moments, and {problem}, or set float32."
    yield "trainer.optimizer.moments_dtype", rounded and bool(problem), why


def _problem(gpu: bool) -> str | None:
    """Return why TransformerEngine's layers cannot run, with a remedy; None if they can."""
    if not gpu:
        return "TransformerEngine has no CPU kernels: run the trainer on GPUs"
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{' and '.join(missing)} cannot be found here: install requirements/gpu.txt"
    return None


def assumed(config: Config, gpus: int, dtypes: Mapping[str, str] | None = None) -> Config:
    """Return the configuration with these dtypes. Parts without one, which do not run, or whose machines are not known
    yet, get the most likely: bfloat16 on GPUs and float32, the larger format, on CPUs."""
    changes = {}
    for part in sections(config):
        section = getattr(config, part)
        likely = "bfloat16" if on_gpu(section, gpus) else "float32"
        dtype = (dtypes or {}).get(part, likely if section.dtype == AUTO else section.dtype)
        changes[part] = section.model_copy(update={"dtype": dtype})
    return config.model_copy(update=changes)


def recorded(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """Return config.json of the run that this one follows or resumes; None if there is none."""
    folders = [*lookup.followed(config), *origins(config, run_dir)]
    file = next((one / "config.json" for one in folders if (one / "config.json").is_file()), None)
    try:
        found = json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _settled(
    config: Config, part: str, gpus: int, before: dict[str, Any], given: Mapping[str, tuple[str, str]]
) -> DtypeChoice:
    """Return the number format of a part, which is `auto` if its platform has to choose it."""
    section = getattr(config, part)
    if section.dtype != AUTO:
        return DtypeChoice(part, section.dtype, "as set")
    if part in given:
        return DtypeChoice(part, *given[part])
    if (kept := before.get(part, {}).get("dtype") or AUTO) != AUTO:
        return DtypeChoice(part, kept, "auto: as in the run that it resumes or replays")
    if on_gpu(section, gpus):
        return DtypeChoice(part, "bfloat16", "auto: it runs on GPUs")
    return DtypeChoice(part, AUTO, "")


def _machines(placement: Placement, part: str) -> list[str]:
    """Return the machines of a part. Attached engines cannot be probed, so the trainers' machines stand in for
    theirs."""
    placed = {"trainer": placement.trainers, **placement.fleets}.get(part)
    seats = placed or (placement.trainers if part == "engine" else []) or [placement.rollout]
    return list(dict.fromkeys(seat.node.name for seat in seats))
