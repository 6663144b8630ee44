"""Memory of a trainer rank and of an engine rank, computed from shapes. All sizes are in bytes unless a name says
otherwise.

Persistent memory is counted exactly: weights, gradients, master weights and moments as in trainer/network.py and
trainer/optimizer.py, and the buckets of a publish as in weights/publish.py. Activations are estimated
(planner/activations.py). Not counted: the libraries' own memory, and fragmentation of their allocators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.planner.activations import Training, activations, gather_buffer, logits
from asyncrl.planner.shapes import (
    BYTES,
    FLOAT,
    ParallelLayout,
    RankParameters,
    Shape,
    Weight,
    held,
    of_critic,
    parameters,
    stages_of,
)

MASTER, MOMENTS, GRADIENT = FLOAT, 2 * FLOAT, FLOAT
"""Bytes per parameter in float32; AdamW has two moments."""
CHECKPOINT = MASTER + MOMENTS
"""Bytes per parameter in a checkpoint, whatever the training precision (trainer/sharded.py)."""
KEYS = ("k_proj.weight", "v_proj.weight")
"""Name suffixes of tensors that engine ranks hold replicated if there are more ranks than key-value heads
(weights/engine_layout.py)."""


def trainer_rank(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> dict[str, int]:
    """Return the bytes on the rank that holds most, by purpose."""
    stages = [_stage(weights, shape, layout, training, stage) for stage in range(layout.pipeline)]
    return max(stages, key=lambda parts: sum(parts.values()))


def _stage(
    weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training, stage: int
) -> dict[str, int]:
    item, networks = BYTES[training.dtype], _networks(weights, shape, critic=training.critic)
    counts = [held(*network, layout, stage) for network in networks]
    own, every = counts[0].all, sum(count.all for count in counts)
    steps = [_stepped(count, layout) for count in counts]
    masters = MASTER if item < MASTER else 0  # float32 weights are their own masters
    sent = sum(one.elements for one in weights if stage in stages_of(one, shape, layout)) * item * training.publishes
    last = stage == layout.pipeline - 1
    matrices = [one for one in weights if one.layer is not None and len(one.shape) > 1]
    parts = {
        "weights": every * item,
        "weights in FP8": 2 * held(matrices, shape, layout, stage).all * len(networks) * training.fp8,
        "gradients": every * GRADIENT,
        "masters": sum(steps) * masters,
        "moments": sum(steps) * MOMENTS,
        "frozen weights": own * item * training.frozen,
        "publish buckets": min(sent, 2 * training.bucket) if training.bucket else sent,
        "activations": activations(shape, layout, training, stage),
        "logits": logits(shape, layout, training) if last else 0,
        "gather buffer": gather_buffer(shape, layout, training),
    }
    if training.offload:  # one network's states come back when nothing is left of a pass
        del parts["masters"], parts["moments"]
        returning = max(steps) * (masters + MOMENTS)
        parts["states beyond a pass"] = max(0, returning - parts["activations"] - parts["logits"])
    return parts


def _networks(weights: Sequence[Weight], shape: Shape, *, critic: bool) -> list[tuple[Sequence[Weight], Shape]]:
    """Return each network that is trained: its weights, and its shape."""
    policy = (weights, shape)
    return [policy, (of_critic(weights, shape), replace(shape, tied=False))] if critic else [policy]


def _stepped(mine: RankParameters, layout: ParallelLayout) -> int:
    """Return the number of parameters whose optimizer state a rank holds: Megatron's distributed optimizer shards it
    over the replicas, if there are any."""
    if layout.replicas == 1:
        return mine.all
    return -(-mine.dense // layout.replicas) + -(-mine.routed // layout.expert_replicas)


def offloaded(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of host memory in which a rank keeps masters and moments that are offloaded."""
    stages = (_stage(weights, shape, layout, replace(training, offload=False), n) for n in range(layout.pipeline))
    return max(parts["masters"] + parts["moments"] for parts in stages) if training.offload else 0


def checkpoint_staging(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, *, critic: bool) -> int:
    """Return the bytes of host memory in which a rank stages its part of a checkpoint (trainer/sharded.py)."""
    networks = _networks(weights, shape, critic=critic)
    stages = (
        sum(_stepped(held(*network, layout, stage), layout) for network in networks) for stage in range(layout.pipeline)
    )
    return max(stages) * CHECKPOINT


def checkpoint_bytes(weights: Sequence[Weight], shape: Shape, *, critic: bool) -> int:
    """Return the bytes of a checkpoint on disk."""
    return sum(parameters(network).all for network, _ in _networks(weights, shape, critic=critic)) * CHECKPOINT


def engine_rank(
    weights: Sequence[Weight], shape: Shape, *, tensor: int, dtype: str, tokens: int, cache_dtype: str = ""
) -> dict[str, int]:
    """Return the bytes on one rank of an engine: its share of the weights, and the KV cache of this many tokens."""
    share = ParallelLayout(tensor=tensor, data=1, expert_tensor=tensor)
    item = 1 if cache_dtype.startswith("fp8") else BYTES[dtype]
    cache, parts = tokens * shape.layers * shape.cached * item, min(tensor, shape.cache_heads)
    repeated = sum(one.elements // parts - one.elements // tensor for one in weights if one.name.endswith(KEYS))
    return {
        "weights": (held(weights, shape, share, 0).all + repeated) * BYTES[dtype],
        "KV cache": cache // parts,
    }


def cache_that_fits(weights: Sequence[Weight], shape: Shape, room: float, *, tensor: int, dtype: str) -> int:
    """Return the number of tokens whose KV cache fits beside an engine's weights, with `room` bytes on each rank."""
    rank = engine_rank(weights, shape, tensor=tensor, dtype=dtype, tokens=1_000_000)
    return int((room - rank["weights"]) * 1_000_000 / rank["KV cache"])


AWAY = ("weights", "masters", "moments", "frozen weights")
"""Parts of a trainer rank that it keeps in host memory while engines use its GPU; gradients are dropped."""


def turns(trainer: dict[str, int], engine: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes on a GPU that a trainer rank and an engine rank use in turns (cluster.placement=colocated), by
    turn and purpose. The buckets of a publish stay throughout."""
    both = {f"engine's {name}": size for name, size in engine.items()}
    sent = {"publish buckets": trainer["publish buckets"]}
    return {
        "generate": {**both, **sent},
        "train": trainer,
        "publish": {"engine's weights": engine["weights"], "weights": trainer["weights"], **sent},
    }


def away(trainer: dict[str, int]) -> int:
    """Return the bytes of host memory that a trainer rank needs while engines use its GPU."""
    return sum(trainer[name] for name in AWAY)
