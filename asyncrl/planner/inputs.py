"""Input of `asyncrl-plan`: numbers as typed, computed for a model and a GPU, or fitted to a recorded run (fit.py)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.models.tensors import tensors
from asyncrl.planner import memory, sizing
from asyncrl.planner.activations import Recompute, Training
from asyncrl.planner.engine import EngineShape
from asyncrl.planner.laws import LengthSample
from asyncrl.planner.lengths import Lengths
from asyncrl.planner.search import GpuSplit
from asyncrl.planner.shapes import ParallelLayout, Shape, Weight, counted, shape_of
from asyncrl.planner.simulation import SimulatedWorkload
from asyncrl.planner.sizing import FleetSpec, Hardware

HARDWARE = {
    "h100": Hardware(),
    "h200": Hardware(memory=141e9, hbm=4.8e12),
    "a100": Hardware(hbm=2.04e12, inside=300e9, between=25e9, flops=312e12),
}
"""GPUs as their vendor states them, with the assumptions of sizing.py."""
MOST_SPLITS = 48
DTYPE, BUCKET, MICRO_BATCH, LOGIT_ROWS = "bfloat16", 512 << 20, 4096, 1024
"""What a model is planned with: number format, bytes of a publish's bucket, tokens of a micro-batch, rows of logits."""
ROOM = 0.9
"""Fraction of a GPU's memory that may be planned; libraries and fragmentation take the rest."""


LIMIT = 1e15
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 10)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=LIMIT)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, lt=LIMIT)]
Turns = Annotated[float, msgspec.Meta(ge=1, lt=LIMIT)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PlanInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is made from. Fields whose default is None are computed if a model is given."""

    gpus: Count
    """GPUs of the run."""
    batch_groups: Count = 64
    group_size: Count = 8
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
    max_staleness: Natural = 8
    """Largest bound to consider."""
    model: str | None = None
    """A config.json, or the folder that holds it."""
    gpu: Literal["h100", "h200", "a100"] = "h100"
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
    switch: NotNegative = 15.0
    """Seconds per step for changing from generating to training and back, if both use the same GPUs."""

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
    for name in ("gpus", "mean", "longest"):
        if settings.get(name) is None:
            raise ConfigError(name, None, f"This field has no value: add {name}=NUMBER.")
    try:
        found = msgspec.convert(settings, PlanInput, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].strip("`")
        raise ConfigError(name, settings.get(name), f"{str(error).partition(' - at')[0]}.") from None
    if found.batch_parts > found.batch_groups:
        raise ConfigError("batch_parts", found.batch_parts, f"Must not exceed batch_groups ({found.batch_groups}).")
    needed = ("per_token", "per_request", "train_rate")
    if found.model is None and (missing := [name for name in needed if getattr(found, name) is None]):
        raise ConfigError(missing[0], None, "Set it, or model=FOLDER to compute it, or name a recorded run.")
    return found


def splits(given: PlanInput) -> list[GpuSplit]:
    """Return the splits to search. Raises ConfigError if the model does not fit."""
    return list(_of_model(given) if given.model else _of_numbers(given))


def _of_numbers(given: PlanInput) -> Iterator[GpuSplit]:
    assert given.per_token is not None
    assert given.per_request is not None
    assert given.train_rate is not None
    shape = _overridden(EngineShape(given.per_token, given.per_request), given)
    engine, trainer = given.engine_gpus or 1, given.trainer_gpus or 1
    fixed, pause = given.train_fixed or 0.0, given.pause or 0.0
    for trainers in _shares(given, engine, trainer, trainer):
        rate, count = given.train_rate * trainers, given.engines or (given.gpus - trainers) // engine
        layout = (f"trainer.data_parallel={trainers // trainer}",)
        speeds = shape, rate, fixed, pause, given.batch_parts, given.overlap
        yield GpuSplit(count, engine, trainers, *speeds, overrides=layout)
    if given.gpus >= engine:
        everything = given.gpus // engine, engine, given.gpus, shape, given.train_rate * given.gpus
        yield GpuSplit(*everything, fixed, given.switch, colocated=True)


def _shares(given: PlanInput, engine: int, copy: int, step: int) -> Sequence[int]:
    """Return numbers of trainer GPUs, multiples of a step, and of a machine in large runs. No copy of the weights is
    without a group of the batch."""
    most = min(given.gpus - engine * (given.engines or 1), copy * given.batch_groups)
    if given.trainers:
        return (given.trainers,) if given.trainers <= most else ()
    step = math.lcm(step, 8) if given.gpus >= 64 else step
    found = range(step, most + 1, step)
    return found[:: -(-len(found) // MOST_SPLITS)] if found else found


def _overridden(shape: EngineShape, given: PlanInput) -> EngineShape:
    """Return the speed of an engine with what is given instead of computed."""
    names = ("per_token", "per_request", "max_running", "kv_tokens", "prefill_rate")
    typed = {name: value for name in names if (value := getattr(given, name)) is not None}
    return replace(shape, **(typed | {"max_running": min(given.max_running, shape.max_running)}))


# -- a model ------------------------------------------------------------------------------------------------------

LAYOUTS = sorted(
    ((t, p, e) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16) for e in (1, 8, 64) if t * p <= 64),
    key=lambda layout: (layout[0] * layout[1], layout[1], layout[2]),
)
"""Tensor, pipeline and expert parallelism of the trainer, in the order in which they are tried."""


def _of_model(given: PlanInput) -> Iterator[GpuSplit]:
    assert given.model is not None
    path = Path(given.model)
    try:
        hf = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        shape = shape_of(hf)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model", given.model, f"Name a config.json of a known family ({error}).") from None
    weights, hardware = counted([Weight(name, size) for name, size in tensors(hf)], shape), HARDWARE[given.gpu]
    for tensor in _engines_that_fit(given, weights, shape, hardware):
        engine, parts = _engine(given, weights, shape, tensor, hardware)
        layout, training, least = _trainer_that_fits(given, weights, shape, tensor, hardware)
        copy = layout.tensor * layout.pipeline
        step = math.lcm(copy, layout.pipeline * layout.expert)
        for trainers in (*_shares(given, tensor, copy, step), given.gpus):
            now = replace(layout, data=trainers // copy)
            if trainers < least * copy or trainers % step:
                continue
            rank, colocated = memory.trainer_rank(weights, shape, now, training), trainers == given.gpus
            if colocated:
                engine, parts = _engine(given, weights, shape, tensor, hardware, rank["publish buckets"])
                if max(sum(turn.values()) for turn in memory.turns(rank, parts).values()) > ROOM * hardware.memory:
                    continue
            rate, fixed, pause = _trainer_times(given, weights, shape, now, training, hardware)
            yield GpuSplit(
                given.gpus // tensor if colocated else given.engines or (given.gpus - trainers) // tensor,
                tensor,
                trainers,
                engine,
                rate * trainers,
                fixed,
                pause + given.switch * colocated,
                1 if colocated else given.batch_parts,
                given.overlap and not colocated,
                colocated,
                tuple(_overrides(now, training, tensor, engine)),
                {"trainer": sum(rank.values()), "engine": sum(parts.values())},
            )


def _trainer_times(
    given: PlanInput,
    weights: list[Weight],
    shape: Shape,
    layout: ParallelLayout,
    training: Training,
    hardware: Hardware,
) -> tuple[float, float, float]:
    """Return tokens per second of a GPU, fixed seconds per step, and seconds of the pause."""
    sent = sizing.publish(
        weights,
        shape,
        layout,
        dtype=DTYPE,
        bucket=BUCKET,
        streams=not given.overlap,
        one_machine=given.gpus <= hardware.per_machine,
        hardware=hardware,
    )
    forward_again = 0.75 if training.recompute.granularity == "full" else 1.0  # 6 operations become 8
    rate = given.train_rate or sizing.train_rate(weights, shape, hardware) * forward_again
    fixed = sent.fill if given.train_fixed is None else given.train_fixed
    return rate, fixed, sent.pause if given.pause is None else given.pause


def _engines_that_fit(given: PlanInput, weights: list[Weight], shape: Shape, hardware: Hardware) -> list[int]:
    """Return the two smallest degrees of tensor parallelism at which an engine holds the longest episode."""
    tried = (given.engine_gpus,) if given.engine_gpus else (1, 2, 4, 8)
    found = [tensor for tensor in tried if _cache(weights, shape, tensor, hardware) >= given.prompt + given.longest][:2]
    if not found:
        raise ConfigError("engine_gpus", given.engine_gpus, "No engine holds the model and its longest episode.")
    return found


def _cache(weights: list[Weight], shape: Shape, tensor: int, hardware: Hardware, taken: int = 0) -> int:
    room = ROOM * hardware.memory - 2 * BUCKET - taken
    return memory.cache_that_fits(weights, shape, room, tensor=tensor, dtype=DTYPE)


def _engine(
    given: PlanInput, weights: list[Weight], shape: Shape, tensor: int, hardware: Hardware, taken: int = 0
) -> tuple[EngineShape, dict[str, int]]:
    """Return the speed of an engine, and the bytes on each of its GPUs, by purpose; others have `taken` bytes."""
    tokens = _cache(weights, shape, tensor, hardware, taken)
    rank = memory.engine_rank(weights, shape, tensor=tensor, dtype=DTYPE, tokens=tokens)
    context = given.prompt + LengthSample.of(given.lengths().group, 128).live
    fleet = FleetSpec(1, tensor, given.max_running, tokens)
    found = sizing.engine_shape(rank, fleet, context, hardware)
    prefill = 3 * tensor * sizing.train_rate(weights, shape, hardware)  # forward alone
    found = replace(found, kv_tokens=float(tokens), prefill_rate=prefill)
    return _overridden(found, given), rank | {"received bucket": 2 * BUCKET}


def _trainer_that_fits(
    given: PlanInput, weights: list[Weight], shape: Shape, engine: int, hardware: Hardware
) -> tuple[ParallelLayout, Training, int]:
    """Return the layout with the fewest GPUs per copy of the weights that fits on half of the GPUs, at best without
    recomputing activations and inside of a machine, and how many copies it takes; if there is none, on all GPUs."""
    longest = max(MICRO_BATCH, round(given.prompt + given.longest))
    tried = (given.layout,) if given.layout else LAYOUTS
    for part, recompute, (tensor, pipeline, expert) in itertools.product((2, 1), ("none", "full"), tried):
        copy, each = tensor * pipeline, expert // math.gcd(expert, tensor)
        most = (given.gpus - engine * (given.engines or 1)) // (copy * each * part) * each
        if not most or shape.layers % pipeline or (given.trainer_gpus or copy) != copy:
            continue
        if (expert > 1 and (not shape.experts or shape.experts % expert)) or (recompute == "none" and copy > 8):
            continue
        training = Training(
            *(DTYPE, longest, LOGIT_ROWS),
            bucket=0 if given.overlap else BUCKET,  # 0: all of them
            fused_norms=True,
            recompute=Recompute(recompute),
        )
        layout = ParallelLayout(tensor, pipeline, data=most, expert=expert, sequence=tensor > 1)

        def fits(data: int, layout: ParallelLayout = layout, training: Training = training) -> bool:
            if layout.tensor * data % layout.expert:
                return False
            rank = memory.trainer_rank(weights, shape, replace(layout, data=data), training)
            return sum(rank.values()) <= ROOM * hardware.memory

        if fits(most):
            return layout, training, _fewest(fits, most)
    raise ConfigError(
        "gpus", given.gpus, "The trainer fits in no layout that is tried: add GPUs, or shorten `longest`."
    )


def _fewest(fits: Callable[[int], bool], most: int) -> int:
    """Return the smallest power of two of copies that fits, or all."""
    powers: Iterable[int] = (2**power for power in range(most.bit_length()))
    return next((data for data in powers if data < most and fits(data)), most)


def _overrides(layout: ParallelLayout, training: Training, tensor: int, engine: EngineShape) -> Iterator[str]:
    yield f"trainer.tensor_parallel={layout.tensor}"
    yield f"trainer.sequence_parallel={str(layout.sequence).lower()}"
    yield f"trainer.pipeline_parallel={layout.pipeline}"
    yield f"trainer.context_parallel={layout.context}"
    yield f"trainer.data_parallel={layout.data}"
    if layout.expert > 1:
        yield f"trainer.expert_parallel={layout.expert}"
        yield f"trainer.expert_tensor_parallel={layout.expert_tensor}"
    yield f"trainer.recompute.granularity={training.recompute.granularity}"
    yield f"engine.tensor_parallel={tensor}"
    yield f"engine.max_running_requests={engine.max_running}"
    yield f"engine.max_total_tokens={int(engine.kv_tokens)}"
