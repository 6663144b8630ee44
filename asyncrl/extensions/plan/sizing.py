"""Estimated duration of a publish and throughput of training and generation on any hardware, computed from
specifications. Pure.

A publish is modelled after weights/publish.py over NCCL (weights/distributed.py). The pipeline stages send one after
the other, because an engine receives one broadcast at a time; at once they would share the same adapter of each engine.
The first rank of a stage gathers its bucket and copies it into place: dense matrices come from its tensor-parallel
group, routed experts from all ranks that hold them (weights/reshard.py). One broadcast then sends the bucket to all
ranks of all engines, which load it and confirm.

    gather(b)   b (n - 1)/G / inside + b (G - n)/G / between + 2 b / memory       G ranks, n of them in one machine
    send(b)     b / link + 2 b / memory + call + tensor * (tensors in it)       link: inside if one machine has all
    full        fill: gathers of the slowest stage, while engines generate;    pause: all sends
    stream      pause, per stage: first gather, max(send, next gather) for each bucket but the last, last send; a later
                stage has gathered its first two buckets before its turn

None of this was measured on such hardware. `Hardware` states the source of each number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.extensions.plan.adapters import Adapters
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.estimate import ModelSize
from asyncrl.extensions.plan.laws import engines_bound, trainer_bound
from asyncrl.extensions.plan.shapes import ParallelLayout, Shape, of_stage, parameters
from asyncrl.extensions.plan.tensors import BYTES, Weight


@dataclass(frozen=True)
class Hardware:
    """Specifications of one GPU, in bytes and bytes per second, and assumptions about it: an NVIDIA H100 SXM with one
    400 Gbit/s adapter, as stated by the vendors."""

    memory: float = 80e9
    hbm: float = 3.35e12  # HBM3
    inside: float = 450e9  # NVLink 4, one direction
    between: float = 50e9  # NDR InfiniBand, 400 Gbit/s
    flops: float = 989e12  # bfloat16, dense
    per_machine: int = 8
    share: float = 0.7
    """Attained fraction of each of these bandwidths: an assumption."""
    mfu: float = 0.3
    """Attained fraction of the floating-point operations when training a dense model: an assumption."""
    sparse_mfu: float = 0.15
    """The same with routed experts, whose products are smaller: an assumption. It does not depend on whether they are
    grouped (trainer.layers)."""
    call: float = 0.004
    """Overhead per bucket in seconds, besides its bytes: measured with one engine on a CPU (docs/weights.md)."""
    tensor: float = 30e-6
    """Python overhead of an engine per loaded tensor, in seconds: measured in the same setup, 8 ms for 272 tensors."""


@dataclass(frozen=True)
class FleetSpec:
    """The engines of a run."""

    count: int
    tensor: int
    running: int
    """Maximum number of requests that one engine decodes concurrently."""
    tokens: int
    """KV cache size of one engine, in tokens."""


@dataclass(frozen=True)
class Publish:
    """Size and duration of publishing one version to all engines."""

    nbytes: int
    buckets: tuple[int, ...]
    """Number of buckets per pipeline stage."""
    fill: float
    """Seconds before the pause."""
    pause: float
    """Seconds for which the engines are paused."""

    @property
    def seconds(self) -> float:
        """Return the total seconds for which the trainer is occupied."""
        return self.fill + self.pause


def packed(sizes: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of tensors of each bucket, in order, as weights/bucket.py plans them. A larger
    tensor gets a bucket of its own."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        filled, count = found[-1] if found else (limit, 0)
        if not found or filled + size > limit:
            found.append((size, 1))
        else:
            found[-1] = (filled + size, count + 1)
    return found


def publish(
    weights: Sequence[Weight],
    shape: Shape,
    layout: ParallelLayout,
    *,
    dtype: str,
    bucket: int,
    streams: bool,
    one_machine: bool,
    hardware: Hardware,
) -> Publish:
    """Estimate a publish. `weights` is a result of shapes.counted; `bucket` is in bytes; `one_machine` tells whether
    one machine holds all trainers and engines."""
    item, link = BYTES[dtype], hardware.inside if one_machine else hardware.between
    counts, stages = [], []
    for stage in range(layout.pipeline):
        held_here = of_stage(weights, shape, layout, stage)
        mine = [one for one in held_here if stage == 0 or "embed_tokens" not in one.name]  # the first publishes it
        full = packed((one.elements * item for one in mine), bucket)
        counts.append(len(full))
        held = parameters(mine)
        gather = _gather(held.dense / held.all, layout, hardware)
        copy = 2 / (hardware.hbm * hardware.share)
        gathers = [size * gather for size, _ in full]
        sends = [
            size * (1 / (link * hardware.share) + copy) + hardware.call + hardware.tensor * tensors
            for size, tensors in full
        ]
        stages.append((gathers, sends))
    nbytes = item * parameters(weights).all
    if not streams:
        fill = max(sum(gathers) for gathers, _ in stages)
        return Publish(nbytes, tuple(counts), fill, sum(sum(sends) for _, sends in stages))
    pause = 0.0
    for stage, (gathers, sends) in enumerate(stages):
        left = [0.0, 0.0, *gathers[2:]][: len(gathers)] if stage else gathers
        pause += _in_turn(left, sends)
    return Publish(nbytes, tuple(counts), 0.0, pause)


def publish_adapter(weights: Sequence[Weight], adapters: Adapters, *, dtype: str, hardware: Hardware) -> Publish:
    """Estimate a publish of an adapter, while engines generate, as the extension lora: its matrices travel through
    memory of the host or a file, at the speed of one network adapter."""
    matrices = adapters.matrices(weights) * adapters.count
    nbytes = parameters(matrices).all * BYTES[dtype]
    fill = nbytes / (hardware.between * hardware.share) + hardware.call + len(matrices) * hardware.tensor
    return Publish(nbytes, (1,), fill, 0.0)


def _gather(dense: float, layout: ParallelLayout, hardware: Hardware) -> float:
    """Return the gather time in seconds per byte of a stage; `dense` is the fraction that is not routed experts."""
    seconds = 2 / hardware.hbm
    for part, ranks in ((dense, layout.tensor), (1 - dense, layout.expert * layout.expert_tensor)):
        near = min(ranks, hardware.per_machine)
        seconds += part * ((near - 1) / hardware.inside + (ranks - near) / hardware.between) / ranks
    return seconds / hardware.share


def _in_turn(gathers: Sequence[float], sends: Sequence[float]) -> float:
    """Return the duration of alternating gathers and sends with two buffers: one is filled while the other is sent."""
    return gathers[0] + sum(max(pair) for pair in zip(sends, gathers[1:], strict=False)) + sends[-1]


# -- balance -----------------------------------------------------------------------------------------------


def train_rate(weights: Sequence[Weight], shape: Shape, hardware: Hardware, adapters: Adapters | None = None) -> float:
    """Return the training throughput of one GPU in tokens per second: 6 operations per active parameter, forward and
    backward, of which a frozen base saves 2 (arXiv 2001.08361, section 2.1). Attention scores and shared prompts are
    ignored; they are assumed to offset each other."""
    mfu = hardware.sparse_mfu if shape.sparse else hardware.mfu
    size = ModelSize.of(weights, shape, adapters)
    return mfu * hardware.flops / size.training(1, 1)


def engine_shape(rank: dict[str, int], fleet: FleetSpec, context: float, hardware: Hardware) -> EngineShape:
    """Estimate the decoding speed of an engine: a step reads a rank's weights once, and the cache of each request of
    `context` tokens. `rank` is a result of memory.engine_rank. Communication between ranks, sampling and prefill are
    ignored. The batch holds as many requests as fit the cache."""
    speed = hardware.hbm * hardware.share
    each = rank["KV cache"] / fleet.tokens * context
    running = max(1, min(fleet.running, int(fleet.tokens / context)))
    return EngineShape(per_token=rank["weights"] / speed, per_request=each / speed, max_running=running)


@dataclass(frozen=True)
class Balance:
    """Throughput of trainer and engines in tokens per second, if neither ever waited for the other."""

    trainers: float
    engines: float

    @property
    def rate(self) -> float:
        """Return the upper bound of the run's throughput."""
        return min(self.trainers, self.engines)


def balance(
    weights: Sequence[Weight],
    shape: Shape,
    *,
    gpus: int,
    fleet: FleetSpec,
    engine: EngineShape,
    batch_tokens: float,
    sent: Publish,
    hardware: Hardware,
    adapters: Adapters | None = None,
) -> Balance:
    """Compare trainer and engines. `gpus` is the number of trainer GPUs. The trainer also publishes after each batch,
    and the engines stand still during the pause."""
    trains = trainer_bound(train_rate(weights, shape, hardware, adapters) * gpus, sent.seconds, batch_tokens)
    writes = engines_bound(fleet.count, engine)
    return Balance(trains, trainer_bound(writes, sent.pause, batch_tokens))
