"""`dtype: auto`: which number format trainer, engines, teacher and judge compute in, and how long the run will take.

On a GPU it is bfloat16. On a CPU it is what the machines that will run the part multiply faster (asyncrl/probe.py); the
slowest of them decides, so that all ranks agree. What a run goes on from, or replays, decides before that. The launcher
writes the result into config.json, which every process reads, and the reasons into machine.json.

waits for     the probe of each machine (PROBE_SECONDS)
on a hang     LaunchError, which names the machine
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import probe
from asyncrl.config import Config, on_gpu
from asyncrl.errors import LaunchError
from asyncrl.launch.placement import Placement, Seat
from asyncrl.probe import Rates

if TYPE_CHECKING:
    from asyncrl.launch.slurm.job import Job

AUTO = "auto"
PARTS = {"trainer": "train", "engine": "generate", "teacher": "generate", "judge": "generate"}
"""Sections with a dtype, and which of a machine's rates count for them."""
PROBE_SECONDS = 120.0
"""A cold import of torch from a shared file system takes most of it."""
SLOW = 1.5
"""An explicit dtype that takes this many times as long as the other one is warned of."""


@dataclass(frozen=True)
class Choice:
    """The number format of one part."""

    part: str
    dtype: str
    why: str
    rates: Rates | None = None
    """Of the slowest of its machines; None on GPUs, and where nothing was measured."""
    remedy: str = ""
    """Where an explicit setting is slow: what to do."""

    @property
    def field(self) -> str:
        """The setting."""
        return f"{self.part}.dtype"

    def line(self) -> str:
        """For the console."""
        return f"{self.field} {self.dtype}: {self.why}" + (f". {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Precision:
    """The configuration with every dtype resolved, and why."""

    config: Config
    choices: list[Choice] = field(default_factory=list)


def used(config: Config, models: Mapping[str, Any]) -> list[str]:
    """Parts that this run starts and whose model is known; `models` maps part to config.json's values."""
    parts = [part for part in ("teacher", "judge") if getattr(config, part).started]
    parts += ["trainer"] if config.mode != "rollout_only" else []
    parts += ["engine"] if config.mode != "replay" else []
    return [part for part in PARTS if part in parts and part in models]


def resolve(
    config: Config,
    models: Mapping[str, Any],
    placement: Placement,
    gpus: int,
    *,
    job: Job | None = None,
    before: dict[str, Any] | None = None,
    attached: str | None = None,
) -> Precision:
    """Replace every `auto` and say why. `models` maps each part to its model's config.json, `before` is the resolved
    configuration that this run goes on from or replays, `attached` what engines of engine.urls were started with.
    Raises LaunchError when a machine cannot be measured."""
    parts = used(config, models)
    measured = [part for part in parts if not on_gpu(getattr(config, part), gpus)]
    wanted = {part: (_shape(models[part]), _machines(placement, part)) for part in measured}
    try:
        rates = _ask(wanted.values(), job)
    except LaunchError as error:
        if any(getattr(config, part).dtype == AUTO for part in measured):
            raise
        print(f"asyncrl: no estimate, and no warning of a slow dtype: {error}", file=sys.stderr, flush=True)
        wanted = {}
    choices = []
    for part in parts:
        slowest = None
        if part in wanted:
            shape, machines = wanted[part]
            slowest = min((rates[shape, machine] for machine in machines), key=lambda r: max(_of(r, part).values()))
        setting = getattr(config, part).dtype
        if part == "engine" and setting == AUTO and attached:
            choices.append(Choice(part, attached, "auto: the engines of engine.urls were started with it", slowest))
        else:
            choices.append(_choose(part, setting, slowest, (before or {}).get(part, {}).get("dtype")))
    return Precision(_replaced(config, {choice.part: choice.dtype for choice in choices}, gpus), choices)


def assumed(config: Config, gpus: int) -> Config:
    """The configuration of a run whose machines cannot be asked yet: bfloat16 on GPUs, float32, the larger, on CPUs."""
    return _replaced(config, {}, gpus)


def recorded(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """config.json of the run that this one replays, or, with resume, goes on from; None where there is none."""
    if config.mode == "replay":
        folder = config.replay.folder
    elif config.resume == AUTO:
        folder = run_dir
    elif config.resume is not None:
        folder = Path(config.resume).expanduser().absolute()
        folder = folder.parent.parent if not (folder / "config.json").is_file() else folder
    else:
        return None
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _choose(part: str, setting: str, rates: Rates | None, before: str | None) -> Choice:
    kind = PARTS[part]
    if setting != AUTO:
        factor = rates.slowdown(kind, setting) if rates else 1.0
        if rates is None or factor < SLOW:
            return Choice(part, setting, "as set", rates)
        other = rates.faster(kind)
        why = f"as set; {other} is {factor:.1f} times as fast on {_where(rates)} (measured)"
        return Choice(part, setting, why, rates, f"Set {part}.dtype=auto, or {other}.")
    if before is not None and before != AUTO:
        return Choice(part, before, "auto: as in the run that it goes on from or replays", rates)
    if rates is None:
        return Choice(part, "bfloat16", "auto: it runs on GPUs")
    dtype = rates.faster(kind)
    (other,) = set(probe.DTYPES) - {dtype}
    factor = rates.slowdown(kind, other)
    return Choice(part, dtype, f"auto: {factor:.1f} times as fast as {other} on {_where(rates)} (measured)", rates)


def _where(rates: Rates) -> str:
    return f"{rates.host} ({rates.cpu})"


def _of(rates: Rates, part: str) -> dict[str, float]:
    found: dict[str, float] = getattr(rates, PARTS[part])
    return found


def _replaced(config: Config, dtypes: Mapping[str, str], gpus: int) -> Config:
    """Parts that do not run get what they would most likely have: nothing computes with it."""
    changes = {}
    for part in PARTS:
        section = getattr(config, part)
        likely = "bfloat16" if on_gpu(section, gpus) else "float32"
        dtype = dtypes.get(part, likely if section.dtype == AUTO else section.dtype)
        changes[part] = section.model_copy(update={"dtype": dtype})
    return config.model_copy(update=changes)


def _shape(hf: dict[str, Any]) -> str:
    return f"{hf['hidden_size']}x{hf.get('intermediate_size') or 4 * hf['hidden_size']}"


def _machines(placement: Placement, part: str) -> list[str]:
    """Names of the machines of a part; of engines that others started, those of the trainers: they are not asked."""
    seats: Iterable[Seat] = {
        "trainer": placement.trainers,
        "engine": [seat for engine in placement.engines for seat in engine] or placement.trainers,
        "teacher": placement.teachers,
        "judge": placement.judges,
    }[part] or [placement.rollout]
    return list(dict.fromkeys(seat.node.name for seat in seats))


def _ask(wanted: Iterable[tuple[str, Sequence[str]]], job: Job | None) -> dict[tuple[str, str], Rates]:
    """Rates by shape and machine."""
    pairs = list(dict.fromkeys((shape, machine) for shape, machines in wanted for machine in machines))
    if not pairs:
        return {}
    shapes = list(dict.fromkeys(shape for shape, _ in pairs))
    program = [sys.executable, "-m", "asyncrl.probe", *shapes]
    if job:
        machines = list(dict.fromkeys(machine for _, machine in pairs))
        outputs = job.everywhere(program, PROBE_SECONDS, machines)
    else:
        known = {shape: probe.cached(*_sides(shape)) for shape in shapes}
        complete = {(shape, ""): rates for shape, rates in known.items() if rates}
        if len(complete) == len(shapes):
            return complete
        machines, outputs = [""], [_run(program)]
    found = {(shape, machine if job else ""): rates for output in outputs for shape, machine, rates in _parsed(output)}
    if missing := [machine or "this machine" for shape, machine in pairs if (shape, machine) not in found]:
        said = "\n".join(output[-1000:] for output in outputs)
        raise LaunchError(
            f"the speed of {missing} could not be measured within {PROBE_SECONDS:.0f} s: set trainer.dtype, "
            f"engine.dtype, teacher.dtype and judge.dtype to do without. The probe printed:\n{said}"
        )
    return found


def _sides(shape: str) -> tuple[int, int]:
    hidden, _, inner = shape.partition("x")
    return int(hidden), int(inner)


def _run(program: list[str]) -> str:
    try:
        done = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return str(late.stdout or "")
    return done.stdout


def _parsed(output: str) -> Iterator[tuple[str, str, Rates]]:
    """Shape, machine and rates of each line; other programs print, too."""
    for line in output.splitlines():
        _, mark, text = line.partition(probe.MARK)
        if mark:
            shape, machine, rates = text.split(" ", 2)
            yield shape, machine, Rates.parse(rates)
