"""Resolution of `dtype: auto` for trainer, engines, and models that are not trained.

On a GPU it becomes bfloat16. On a CPU it becomes the format with the faster matrix multiplication on the machines that
will run the part (Platform.measure); the slowest machine decides, so that all ranks agree. The format of a run
that is resumed or replayed takes precedence. The launcher writes the result to config.json, which every process reads,
and the reasons to machine.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import Config, on_gpu
from asyncrl.errors import LaunchError
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Placement, Seat
from asyncrl.launch.resume import origins
from asyncrl.platforms import DTYPES, Rates, without_gpu

AUTO = "auto"
SLOW = 1.5
"""Slowdown of an explicit dtype, relative to the other one, from which a warning is given."""


@dataclass(frozen=True)
class DtypeChoice:
    """The number format of one part, and the reason."""

    part: str
    dtype: str
    why: str
    rates: Rates | None = None
    """Rates of the slowest of its machines; None on GPUs, and if nothing was measured."""
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


def used(config: Config, models: Mapping[str, Any]) -> list[str]:
    """Return the parts that this run starts and whose model is known. `models` maps parts to the contents of
    config.json."""
    parts = ["trainer"] if config.trains else []
    parts += ["engine"] if config.generates else []
    parts += [role for role, section in config.frozen.items() if section.started]
    return [part for part in parts if part in models]


def sections(config: Config) -> list[str]:
    """Return the sections with a dtype."""
    return ["trainer", "engine", *config.frozen]


def _kind(part: str) -> str:
    """Return the kind of measured rate that applies to a part."""
    return "train" if part == "trainer" else "generate"


def resolve(
    config: Config,
    models: Mapping[str, Any],
    placement: Placement,
    gpus: int,
    cluster: Cluster,
    *,
    before: dict[str, Any] | None = None,
    attached: str | None = None,
) -> Precision:
    """Resolve every `auto` and explain the choice. `models` maps each part to its model's config.json, `before` is the
    resolved configuration of the run that is resumed or replayed, `attached` the dtype of the engines of engine.urls.
    Raises LaunchError if a machine cannot be measured."""
    parts = used(config, models)
    measured = [part for part in parts if not on_gpu(getattr(config, part), gpus)]
    wanted = {part: (_shape(models[part]), _machines(placement, part)) for part in measured}
    try:
        rates = _ask(wanted.values(), cluster)
    except LaunchError as error:
        if any(getattr(config, part).dtype == AUTO for part in measured):
            raise
        print(
            f"asyncrl: there is no time estimate and no warning about a slow dtype: {error}",
            file=sys.stderr,
            flush=True,
        )
        wanted = {}
    choices = []
    for part in parts:
        slowest = None
        if part in wanted:
            shape, machines = wanted[part]
            slowest = min((rates[shape, machine] for machine in machines), key=lambda r: max(_of(r, part).values()))
        setting = getattr(config, part).dtype
        if part == "engine" and setting == AUTO and attached:
            choices.append(
                DtypeChoice(part, attached, "auto: the engines of engine.urls were started with it", slowest)
            )
        else:
            choices.append(_choose(part, setting, slowest, (before or {}).get(part, {}).get("dtype")))
    return Precision(_replaced(config, {choice.part: choice.dtype for choice in choices}, gpus), choices)


def measured(hf: dict[str, Any], machines: Sequence[str], cluster: Cluster) -> Rates:
    """Return the rates of the slowest of these machines for a model. Raises LaunchError if one cannot be measured."""
    return min(_ask([(_shape(hf), machines)], cluster).values(), key=lambda rates: max(rates.train.values()))


def assumed(config: Config, gpus: int) -> Config:
    """Return the configuration of a run whose machines cannot be measured yet: bfloat16 on GPUs and float32, the larger
    format, on CPUs."""
    return _replaced(config, {}, gpus)


def recorded(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """Return config.json of the run that is replayed or resumed; None if there is none."""
    folders = [config.replay.folder] if config.mode == "replay" else origins(config, run_dir)
    file = next((one / "config.json" for one in folders if (one / "config.json").is_file()), None)
    try:
        found = json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _choose(part: str, setting: str, rates: Rates | None, before: str | None) -> DtypeChoice:
    kind = _kind(part)
    if setting != AUTO:
        factor = rates.slowdown(kind, setting) if rates else 1.0
        if rates is None or factor < SLOW:
            return DtypeChoice(part, setting, "as set", rates)
        other = rates.faster(kind)
        why = f"as set; {other} is {factor:.1f} times as fast on {_where(rates)} (measured)"
        return DtypeChoice(part, setting, why, rates, f"Set {part}.dtype=auto, or {other}.")
    if before is not None and before != AUTO:
        return DtypeChoice(part, before, "auto: as in the run that it resumes or replays", rates)
    if rates is None:
        return DtypeChoice(part, "bfloat16", "auto: it runs on GPUs")
    dtype = rates.faster(kind)
    (other,) = set(DTYPES) - {dtype}
    factor = rates.slowdown(kind, other)
    return DtypeChoice(part, dtype, f"auto: {factor:.1f} times as fast as {other} on {_where(rates)} (measured)", rates)


def _where(rates: Rates) -> str:
    return f"{rates.host} ({rates.cpu})"


def _of(rates: Rates, part: str) -> dict[str, float]:
    found: dict[str, float] = getattr(rates, _kind(part))
    return found


def _replaced(config: Config, dtypes: Mapping[str, str], gpus: int) -> Config:
    """Return the configuration with these dtypes. Parts that do not run get their most likely dtype, which has no
    effect."""
    changes = {}
    for part in sections(config):
        section = getattr(config, part)
        likely = "bfloat16" if on_gpu(section, gpus) else "float32"
        dtype = dtypes.get(part, likely if section.dtype == AUTO else section.dtype)
        changes[part] = section.model_copy(update={"dtype": dtype})
    return config.model_copy(update=changes)


def _shape(hf: dict[str, Any]) -> str:
    return f"{hf['hidden_size']}x{hf.get('intermediate_size') or 4 * hf['hidden_size']}"


def _machines(placement: Placement, part: str) -> list[str]:
    """Return the machines of a part. Attached engines cannot be probed, so the trainers' machines stand in for
    theirs."""
    seats: Iterable[Seat] = {
        "trainer": placement.trainers,
        "engine": [seat for engine in placement.engines for seat in engine] or placement.trainers,
        **placement.frozen,
    }.get(part) or [placement.rollout]
    return list(dict.fromkeys(seat.node.name for seat in seats))


def _ask(wanted: Iterable[tuple[str, Sequence[str]]], cluster: Cluster) -> dict[tuple[str, str], Rates]:
    """Return the measured rates by shape and machine. Raises LaunchError if a measurement is missing."""
    pairs = list(dict.fromkeys((shape, machine) for shape, machines in wanted for machine in machines))
    return without_gpu().measure(pairs, cluster.everywhere) if pairs else {}
