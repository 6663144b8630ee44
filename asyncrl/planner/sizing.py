"""What a publish, training and generation will take on hardware that need not be there, by arithmetic. Pure.

A publish is counted as weights/publish.py goes about it over NCCL (weights/distributed.py). The pipeline stages send
one after the other. The first rank of a stage gathers its bucket: dense matrices from its tensor-parallel group, routed
experts from all ranks that hold them (weights/reshard.py), and copies it into place; then one broadcast takes it to all
ranks of all engines, which load it and answer.

    gather(b)   b (n - 1)/G / inside + b (G - n)/G / between + 2 b / memory       G ranks, n of them in one machine
    send(b)     b / link + 2 b / memory + call + tensor * (tensors in it)       link: inside where one machine has all
    full        fill: the slowest stage's gathers, engines generate;    pause: all sends
    stream      pause, for each stage: first gather, then of each send and the next gather the longer one

Nothing here was measured on such machines. `Hardware` says where each number comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.planner.engine import EngineShape
from asyncrl.planner.laws import engines_law, trainer_law
from asyncrl.planner.memory import BYTES, Layout, Shape, Weight, active, packed, parameters, stages_of


@dataclass(frozen=True)
class Hardware:
    """Of one GPU, in bytes and bytes per second: an NVIDIA H100 SXM with one 400 Gbit/s adapter, as vendors state them;
    and what is assumed of it."""

    memory: float = 80e9
    hbm: float = 3.35e12  # HBM3
    inside: float = 450e9  # NVLink 4, one direction
    between: float = 50e9  # NDR InfiniBand, 400 Gbit/s
    flops: float = 989e12  # bfloat16, dense
    per_machine: int = 8
    share: float = 0.7
    """Of each of these bandwidths that is reached: an assumption."""
    mfu: float = 0.3
    """Of the floating-point operations that training a dense model reaches: an assumption."""
    sparse_mfu: float = 0.15
    """The same with routed experts, which the trainer multiplies one by one: an assumption."""
    call: float = 0.004
    """Seconds that a bucket costs beside its bytes: measured, with one engine on a CPU (docs/weights.md)."""
    tensor: float = 30e-6
    """Seconds of an engine's Python for each tensor that it loads: measured there, 8 ms for 272."""


@dataclass(frozen=True)
class Fleet:
    """The engines."""

    count: int
    tensor: int
    running: int
    """Requests that one engine decodes at once."""
    tokens: int
    """Of its KV cache."""


@dataclass(frozen=True)
class Publish:
    """Of one version to all engines."""

    nbytes: int
    buckets: tuple[int, ...]
    """Of each pipeline stage."""
    fill: float
    """Seconds before the pause."""
    pause: float
    """Seconds for which engines stand still."""

    @property
    def seconds(self) -> float:
        """Of the trainer."""
        return self.fill + self.pause


def publish(
    weights: Sequence[Weight],
    shape: Shape,
    layout: Layout,
    *,
    dtype: str,
    bucket: int,
    streams: bool,
    one_machine: bool,
    hardware: Hardware,
) -> Publish:
    """`weights` as memory.counted gives them; `bucket` in bytes. `one_machine`: it holds all trainers and engines."""
    item, link = BYTES[dtype], hardware.inside if one_machine else hardware.between
    counts, stages = [], []
    for stage in range(layout.pipeline):
        mine = [one for one in weights if stages_of(one, shape, layout)[0] == stage]
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
    return Publish(nbytes, tuple(counts), 0.0, sum(_in_turn(gathers, sends) for gathers, sends in stages))


def _gather(dense: float, layout: Layout, hardware: Hardware) -> float:
    """Seconds for each byte of a stage, of which the share `dense` is not of routed experts."""
    seconds = 2 / hardware.hbm
    for part, ranks in ((dense, layout.tensor), (1 - dense, layout.expert * layout.expert_tensor)):
        near = min(ranks, hardware.per_machine)
        seconds += part * ((near - 1) / hardware.inside + (ranks - near) / hardware.between) / ranks
    return seconds / hardware.share


def _in_turn(gathers: Sequence[float], sends: Sequence[float]) -> float:
    """Two memories: while one is sent the other is filled."""
    return gathers[0] + sum(max(pair) for pair in zip(sends, gathers[1:], strict=False)) + sends[-1]


# -- balance -----------------------------------------------------------------------------------------------


def train_rate(weights: Sequence[Weight], shape: Shape, hardware: Hardware) -> float:
    """Tokens per second of one GPU: 6 operations for each active parameter, forward and backward (arXiv 2001.08361,
    section 2.1). Attention's scores and shared prompts are left out, the one for the other."""
    mfu = hardware.sparse_mfu if shape.sparse else hardware.mfu
    return mfu * hardware.flops / (6 * active(weights, shape))


def engine_shape(rank: dict[str, int], fleet: Fleet, context: float, hardware: Hardware) -> EngineShape:
    """A step of decoding reads a rank's weights once, and the cache of each request, `context` tokens long; `rank` as
    memory.engine_rank gives it. Sums over ranks, sampling and prefill are left out. Requests are as many as fit."""
    speed = hardware.hbm * hardware.share
    each = rank["KV cache"] / fleet.tokens * context
    running = max(1, min(fleet.running, int(fleet.tokens / context)))
    return EngineShape(per_token=rank["weights"] / speed, per_request=each / speed, max_running=running)


@dataclass(frozen=True)
class Balance:
    """Tokens per second of either side, were it never to wait."""

    trainers: float
    engines: float

    @property
    def rate(self) -> float:
        """Of the run: no more than this."""
        return min(self.trainers, self.engines)


def balance(
    weights: Sequence[Weight],
    shape: Shape,
    *,
    gpus: int,
    fleet: Fleet,
    engine: EngineShape,
    batch_tokens: float,
    sent: Publish,
    hardware: Hardware,
) -> Balance:
    """`gpus` of the trainer. It also publishes each batch; engines stand still in the pause."""
    trains = trainer_law(train_rate(weights, shape, hardware) * gpus, sent.seconds, batch_tokens)
    writes = engines_law(fleet.count, engine)
    return Balance(trains, trainer_law(writes, sent.pause, batch_tokens))
