"""Splits of a model's GPUs: engine sizes and layouts of the trainer that fit, with speeds by arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.extensions.plan import memory, sizing
from asyncrl.extensions.plan.activations import Training
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import LengthSample
from asyncrl.extensions.plan.layouts import (
    BUCKET,
    DTYPE,
    Trainer,
    TrainerLayouts,
    check_degree,
    communicating,
    tensor_degrees,
)
from asyncrl.extensions.plan.search import GpuSplit
from asyncrl.extensions.plan.shapes import ParallelLayout, Shape, counted, shape_of
from asyncrl.extensions.plan.sizing import FleetSpec, Hardware
from asyncrl.extensions.plan.tensors import Weight, tensors
from asyncrl.models import catalog
from asyncrl.models.architectures import flat

if TYPE_CHECKING:
    from asyncrl.extensions.plan.inputs import PlanInput

HARDWARE = {
    "h100": Hardware(),
    "h200": Hardware(memory=141e9, hbm=4.8e12),
    "a100": Hardware(hbm=2.04e12, inside=300e9, between=25e9, flops=312e12),
}
"""GPUs as their vendor states them, with the assumptions of sizing.py."""
MOST_SPLITS = 48
MICRO_BATCH = 4096
"""Tokens of a micro-batch, at least: it holds the longest episode."""
EQUAL = 0.05
"""Difference in the time of a step below which the layout with fewer GPUs per copy of the weights is preferred: what
stages and ranks wait for each other is not counted."""
ROOM = 0.9
"""Fraction of a GPU's memory that may be planned; libraries and fragmentation take the rest."""


def shares(given: PlanInput, engine: int, copies: int, step: int) -> Sequence[int]:
    """Return numbers of trainer GPUs, at most `copies` for each group of the batch: multiples of a step, of a machine
    in large runs, and of a power of two of these if they would be more than MOST_SPLITS."""
    most = min(given.gpus - engine * (given.engines or 1), copies * given.batch_groups)
    if given.trainers:
        return (given.trainers,) if given.trainers <= most and given.trainers % step == 0 else ()
    step = math.lcm(step, 8) if given.gpus >= 64 else step
    while most // step > MOST_SPLITS:
        step *= 2
    return range(step, most + 1, step)


def overridden(shape: EngineShape, given: PlanInput) -> EngineShape:
    """Return the speed of an engine with what is given instead of computed."""
    names = ("per_token", "per_request", "max_running", "kv_tokens", "prefill_rate")
    typed = {name: value for name in names if (value := getattr(given, name)) is not None}
    return replace(shape, **(typed | {"max_running": min(given.max_running, shape.max_running)}))


def of_model(given: PlanInput) -> Iterator[GpuSplit]:
    """Yield the splits of a model. Raises ConfigError if it does not fit."""
    hf, shape = read_model(str(given.model))
    weights, hardware = counted(tensors(hf), shape), HARDWARE[given.gpu]
    layouts = TrainerLayouts(hf, shape, weights, hardware)
    trainers = _trainers(given, hf, shape, layouts)
    for tensor in _engines_that_fit(given, hf, layouts.merged, shape):
        engine = _engine(given, layouts.merged, shape, tensor)
        for gpus in shares(given, tensor, max(one.copy for one in trainers), 1):
            if ranked := _ranked(given, layouts, trainers, gpus, overlap=given.overlap):
                count = given.engines or (given.gpus - gpus) // tensor
                yield _split(given, layouts, ranked[0], engine, (count, tensor, gpus))
        for one in [] if given.gpus % tensor else _ranked(given, layouts, trainers, given.gpus, overlap=False):
            taken = layouts.memory(one.layout, one.training)
            engine = _engine(given, layouts.merged, shape, tensor, taken["publish buckets"])
            turns = memory.turns(taken, engine[1]).values()
            fits = max(sum(turn.values()) for turn in turns) <= ROOM * hardware.memory
            if fits and engine[0].kv_tokens >= given.prompt + given.longest:
                yield _split(given, layouts, one, engine, (given.gpus // tensor, tensor, given.gpus), turns=True)
                break


def read_model(name: str) -> tuple[dict[str, Any], Shape]:
    """Return config.json and the shape of the model that `model` names. Raises ConfigError."""
    folder = catalog.resolve(name, "model") if name.startswith(catalog.PREFIX) else Path(name).expanduser()
    try:
        hf = flat(json.loads((folder / "config.json" if folder.is_dir() else folder).read_text()))
        return hf, shape_of(hf)
    except OSError as error:
        remedy = f"Name a config.json or the folder that holds it, or a built-in model ({error.strerror})."
    except (ValueError, KeyError, TypeError) as error:
        remedy = f"It must be the config.json of a family that the trainer knows ({error})."
    raise ConfigError("model", name, remedy)


def _trainers(given: PlanInput, hf: dict[str, Any], shape: Shape, layouts: TrainerLayouts) -> list[Trainer]:
    """Return the layouts of the trainer that fit."""
    if given.layout:
        tensor, pipeline, expert = given.layout
        check_degree("layout", tensor, hf, trainer=True)
        for what, degree, number in (("layers", pipeline, shape.layers), ("experts", expert, shape.experts or 1)):
            if number % degree:
                raise ConfigError("layout", list(given.layout), f"{degree} must divide the model's {number} {what}.")
    most = given.trainers or given.gpus  # all of them take turns with engines
    longest, room = max(MICRO_BATCH, round(given.prompt + given.longest)), ROOM * HARDWARE[given.gpu].memory
    found = [
        one
        for one in layouts.fitting(most, longest, room, given.layout or (), overlap=given.overlap)
        if given.trainer_gpus in (None, one.copy)
    ]
    if not found or (given.trainers and not any(one.on(given.trainers) for one in found)):
        what = "in no layout" if given.layout is None else f"with layout={list(given.layout)}"
        remedy = f"The trainer fits {what} on {most} of {given.gpus} GPUs: add GPUs, or shorten `longest`."
        name = "trainers" if given.trainers else "gpus"
        raise ConfigError(name, getattr(given, name), remedy)
    return found


@dataclass(frozen=True)
class _Trained:
    """A layout of the trainer with its speed."""

    layout: ParallelLayout
    training: Training
    rate: float
    fixed: float
    pause: float
    step: float


def _ranked(
    given: PlanInput, layouts: TrainerLayouts, trainers: Sequence[Trainer], gpus: int, *, overlap: bool
) -> list[_Trained]:
    """Return the layouts that fit on this many GPUs, the fastest first, and those within EQUAL of it by the GPUs that a
    copy of the weights takes. No copy is without a group of the batch."""
    found, tokens = [], given.batch_groups * given.group_size * given.mean
    for one in trainers:
        if (layout := one.on(gpus)) is None or layout.data > given.batch_groups:
            continue
        speed = layouts.speed(layout, one.training, tokens)
        one_machine = given.gpus <= HARDWARE[given.gpu].per_machine
        sent = layouts.publish(layout, streams=not overlap, one_machine=one_machine)
        rate = (given.train_rate or speed.rate) * gpus
        fixed = sent.fill + speed.reduce if given.train_fixed is None else given.train_fixed
        pause = sent.pause if given.pause is None else given.pause
        found.append(_Trained(layout, one.training, rate, fixed, pause, tokens / rate + fixed + pause))
    near = (1 + EQUAL) * min((one.step for one in found), default=0.0)
    copies = [one.layout.tensor * one.layout.pipeline if one.step <= near else math.inf for one in found]
    return [found[at] for at in sorted(range(len(found)), key=lambda at: (copies[at], found[at].step))]


def _split(
    given: PlanInput,
    layouts: TrainerLayouts,
    trained: _Trained,
    engine: tuple[EngineShape, dict[str, int]],
    sizes: tuple[int, int, int],
    *,
    turns: bool = False,
) -> GpuSplit:
    shape, parts = engine
    return GpuSplit(
        *sizes,
        shape,
        trained.rate,
        trained.fixed,
        trained.pause + given.turn_change * turns,
        1 if turns else given.batch_parts,
        given.overlap and not turns,
        turns,
        tuple(_overrides(trained.layout, trained.training, sizes[1], shape, sparse=layouts.sparse)),
        {
            "trainer": sum(layouts.memory(trained.layout, trained.training).values()),
            "engine": sum(parts.values()),
        },
    )


def _engines_that_fit(given: PlanInput, hf: dict[str, Any], weights: list[Weight], shape: Shape) -> list[int]:
    """Return the degrees of tensor parallelism inside of a machine at which an engine holds the longest episode."""
    if given.engine_gpus:
        check_degree("engine_gpus", given.engine_gpus, hf, trainer=False)
    most = min(HARDWARE[given.gpu].per_machine, given.gpus - 1)
    tried = [given.engine_gpus or 0] if given.engine_gpus else tensor_degrees(hf, trainer=False)
    found = [
        tensor
        for tensor in tried
        if (given.engine_gpus or tensor <= most)
        and _cache(weights, shape, tensor, HARDWARE[given.gpu]) >= given.prompt + given.longest
    ]
    if not found:
        raise ConfigError("engine_gpus", given.engine_gpus, "No engine holds the model and its longest episode.")
    return found


def _cache(weights: list[Weight], shape: Shape, tensor: int, hardware: Hardware, taken: int = 0) -> int:
    room = ROOM * hardware.memory - 2 * BUCKET - taken
    return memory.cache_that_fits(weights, shape, room, tensor=tensor, dtype=DTYPE)


def _engine(
    given: PlanInput, weights: list[Weight], shape: Shape, tensor: int, taken: int = 0
) -> tuple[EngineShape, dict[str, int]]:
    """Return the speed of an engine, and the bytes on each of its GPUs, by purpose; others have `taken` bytes."""
    hardware = HARDWARE[given.gpu]
    tokens = _cache(weights, shape, tensor, hardware, taken)
    rank = memory.engine_rank(weights, shape, tensor=tensor, dtype=DTYPE, tokens=tokens)
    context = given.prompt + LengthSample.of(given.lengths().group, 128).live
    fleet = FleetSpec(1, tensor, given.max_running, tokens)
    found = communicating(sizing.engine_shape(rank, fleet, context, hardware), shape, tensor, hardware)
    prefill = 3 * tensor * sizing.train_rate(weights, shape, hardware)  # forward alone
    found = replace(found, kv_tokens=float(tokens), prefill_rate=prefill)
    return overridden(found, given), rank | {"received bucket": 2 * BUCKET}


def _overrides(
    layout: ParallelLayout, training: Training, tensor: int, engine: EngineShape, *, sparse: bool
) -> Iterator[str]:
    yield f"trainer.tensor_parallel={layout.tensor}"
    yield f"trainer.sequence_parallel={str(layout.sequence).lower()}"
    yield f"trainer.pipeline_parallel={layout.pipeline}"
    yield f"trainer.context_parallel={layout.context}"
    yield f"trainer.data_parallel={layout.data}"
    if sparse:
        yield f"trainer.expert_parallel={layout.expert}"
        yield f"trainer.expert_tensor_parallel={layout.expert_tensor}"
    yield f"trainer.recompute.granularity={training.recompute.granularity}"
    yield f"engine.tensor_parallel={tensor}"
    yield f"engine.max_running_requests={engine.max_running}"
    yield f"engine.max_total_tokens={int(engine.kv_tokens)}"
