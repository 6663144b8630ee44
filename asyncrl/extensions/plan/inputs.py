"""Input of `asyncrl-plan`: numbers as typed, computed for a model and a GPU, or fitted to a recorded run (fit.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.model_splits import HARDWARE, of_model, overridden, read_model, shares
from asyncrl.extensions.plan.search import GpuSplit
from asyncrl.extensions.plan.simulation import SimulatedWorkload

SWITCH = 15.0
"""Assumed seconds for changing from generating to training and back on the same GPUs: release of the memory of one side
and return of the other's, over the GPU's connection to its host."""

MOST_EPISODES = 1 << 17
"""Largest batch that is planned."""
REMEDIES = {
    "gpu": f"Choose {', '.join(HARDWARE)}.",
    "layout": "Give tensor, pipeline and expert parallelism, as layout=[4,2,1].",
}
"""What to do about ill-typed fields that their type does not explain."""

LIMIT = 1e15
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=64)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=LIMIT)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, lt=LIMIT)]
Turns = Annotated[float, msgspec.Meta(ge=1, lt=LIMIT)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PlanInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is made from. Fields whose default is None are computed if a model is given."""

    gpus: Count
    """GPUs of the run."""
    batch_groups: Count = 64
    """Groups of a batch."""
    group_size: Count = 8
    """Siblings of a group."""
    batch_parts: Count = 1
    """Parts of a batch, each trained as soon as it is ready (trainer.batch_parts)."""
    overlap: bool = False
    """Whether the next batch is trained during a publish (weights.overlap)."""
    prompt: NotNegative = 0.0
    """Tokens of a prompt."""
    mean: Positive
    """Mean tokens of an episode, before the cutoff at `longest`."""
    sigma: NotNegative = 0.9
    """Standard deviation of the logarithm of an episode's tokens (log-normal)."""
    alike: Fraction = 0.5
    """Fraction of that variance that siblings share."""
    longest: Count
    """Maximum tokens of an episode."""
    turns: Turns = 1.0
    """Mean number of turns."""
    tool_seconds: NotNegative = 0.0
    """Mean seconds in the environment between two turns (log-normal)."""
    max_staleness: Natural = 2
    """Largest bound to consider. A plan is about speed alone, and a higher bound also costs learning
    (docs/algorithms.md)."""
    model: str | None = None
    """A config.json, the folder that holds it, or a built-in model (builtin:NAME)."""
    gpu: Literal["h100", "h200", "a100"] = "h100"
    """Kind of the GPUs that a model is planned for."""
    engine_gpus: Count | None = None
    """GPUs of one engine."""
    trainer_gpus: Count | None = None
    """GPUs that hold the trainer's weights once; the trainer's number of GPUs is a multiple of it."""
    engines: Count | None = None
    """Number of engines; unset: chosen."""
    trainers: Count | None = None
    """GPUs of the trainer; unset: chosen."""
    layout: tuple[Count, Count, Count] | None = None
    """Tensor, pipeline and expert parallelism of a model's trainer; unset: chosen."""
    per_token: Positive | None = None
    """Seconds of a decode step besides those per request."""
    per_request: NotNegative | None = None
    """Further seconds of a decode step per request in the batch."""
    max_running: Count = 256
    """Maximum number of requests that an engine decodes at once."""
    kv_tokens: Positive | None = None
    """Tokens that an engine's cache holds."""
    prefill_rate: Positive | None = None
    """Tokens per second that an engine prefills."""
    train_rate: Positive | None = None
    """Tokens of episodes per second and GPU of the trainer."""
    train_fixed: NotNegative | None = None
    """Further seconds per step of the trainer."""
    pause: NotNegative | None = None
    """Seconds per step for which engines are paused."""
    switch: NotNegative | None = None
    """Seconds per step for changing from generating to training and back, if both use the same GPUs; unset: 15 are
    assumed."""

    @property
    def turn_change(self) -> float:
        """Return `switch`, or what is assumed."""
        return SWITCH if self.switch is None else self.switch

    def lengths(self, seed: int = 0) -> Lengths:
        """Return the distribution of lengths."""
        return Lengths(
            self.mean,
            self.sigma,
            self.longest,
            self.group_size,
            self.alike,
            self.turns,
            self.tool_seconds,
            seed=seed,
        )

    def workload(self, seed: int) -> SimulatedWorkload:
        """Return the workload of a seed."""
        return SimulatedWorkload(self.lengths(seed).episodes(), self.batch_groups, self.prompt, self.longest)


def parse(settings: dict[str, Any]) -> PlanInput:
    """Return the input. Raises ConfigError for unknown, missing, ill-typed and impossible values."""
    known = PlanInput.__struct_fields__
    for name in settings:
        if name not in known:
            raise ConfigError(name, settings[name], f"No such field: choose from {', '.join(known)}.")
    wrong, speeds = list(_missing_or_unknown(settings)), list(_missing_speeds(settings))
    if wrong:
        raise _together([*wrong, *speeds])
    if isinstance(gpu := settings.get("gpu"), str):
        settings = settings | {"gpu": gpu.lower()}
    try:
        found = msgspec.convert(settings, PlanInput, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].partition("[")[0].strip("`")
        remedy = REMEDIES.get(name, f"{str(error).partition(' - at')[0].replace('`', '')}.")
        raise ConfigError(name, settings.get(name), remedy) from None
    if found.batch_parts > found.batch_groups:
        raise ConfigError("batch_parts", found.batch_parts, f"Must not exceed batch_groups ({found.batch_groups}).")
    if (batch := found.batch_groups * found.group_size) > MOST_EPISODES:
        raise ConfigError(
            "batch_groups", found.batch_groups, f"A batch has at most {MOST_EPISODES} episodes, not {batch}."
        )
    if speeds:
        raise _together(speeds)
    return found


def _together(errors: list[ConfigError]) -> ConfigError:
    """Return one error that tells all of these."""
    if len(errors) == 1:
        return errors[0]
    return ConfigError(
        ", ".join(one.field for one in errors), None, " ".join(f"{one.field}: {one.remedy}" for one in errors)
    )


def _missing_or_unknown(settings: dict[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each field that is needed, and for a model or GPU that does not exist."""
    for name in ("gpus", "mean", "longest"):
        if settings.get(name) is None:
            yield ConfigError(name, None, f"It is needed: add {name}=NUMBER.")
    gpu, model = settings.get("gpu"), settings.get("model")
    if isinstance(gpu, str) and gpu.lower() not in HARDWARE:
        yield ConfigError("gpu", gpu, REMEDIES["gpu"])
    if isinstance(model, str):
        try:
            read_model(model)
        except ConfigError as error:
            yield error


def _missing_speeds(settings: dict[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each speed that is needed where no model is named."""
    for name in ("per_token", "per_request", "train_rate") if settings.get("model") is None else ():
        if settings.get(name) is None:
            yield ConfigError(name, None, "Set it, or model=FOLDER to compute it, or name a recorded run.")


def splits(given: PlanInput, kept: Collection[str] = ()) -> list[GpuSplit]:
    """Return the splits to search. Their overrides leave out the settings in `kept`, which are a run's own already.
    Raises ConfigError if there is none in which engines and trainer have GPUs of their own."""
    found = list(of_model(given) if given.model else _of_numbers(given))
    if all(one.colocated for one in found):
        names = ("engines", "trainers", "engine_gpus", "trainer_gpus", "layout")
        typed = [f"{name}={value}" for name in names if (value := getattr(given, name))]
        where = (
            "The trainer fits in no layout beside engines" if given.model else "No split has whole engines and copies"
        )
        obeying = f" with {', '.join(typed)}" if typed else ""
        remedy = f"Trainer and engines need GPUs of their own. {where}{obeying}: add GPUs, or set less."
        raise ConfigError("gpus", given.gpus, remedy)
    return [replace(one, overrides=tuple(w for w in one.overrides if w.partition("=")[0] not in kept)) for one in found]


def _of_numbers(given: PlanInput) -> Iterator[GpuSplit]:
    assert given.per_token is not None
    assert given.per_request is not None
    assert given.train_rate is not None
    shape = overridden(EngineShape(given.per_token, given.per_request), given)
    engine, trainer = given.engine_gpus or 1, given.trainer_gpus or 1
    fixed, pause = given.train_fixed or 0.0, given.pause or 0.0
    limits = [f"engine.tensor_parallel={engine}", f"engine.max_running_requests={shape.max_running}"]
    if shape.kv_tokens < math.inf:
        limits.append(f"engine.max_total_tokens={int(shape.kv_tokens)}")
    for trainers in shares(given, engine, trainer, trainer):
        rate, count = given.train_rate * trainers, given.engines or (given.gpus - trainers) // engine
        layout = (f"trainer.data_parallel={trainers // trainer}", *limits)
        speeds = shape, rate, fixed, pause, given.batch_parts, given.overlap
        yield GpuSplit(count, engine, trainers, *speeds, overrides=layout)
    both = math.lcm(engine, trainer)  # whole engines and whole copies of the trainer's weights, on the same GPUs
    used = min(given.gpus, trainer * given.batch_groups) // both * both
    if used:
        everything = used // engine, engine, used, shape, given.train_rate * used
        layout = (f"trainer.data_parallel={used // trainer}", *limits)
        yield GpuSplit(*everything, fixed, given.turn_change, colocated=True, overrides=layout)
