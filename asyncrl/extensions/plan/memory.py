"""Memory of a trainer rank and of an engine rank, computed from shapes. All sizes are in bytes unless a name says
otherwise.

Persistent memory is counted exactly: weights, gradients, master weights and moments as in trainer/network.py and
trainer/optimizer.py, and the buckets of a publish as in weights/publish.py. Activations are estimated
(activations.py). Not counted: the libraries' own memory, and fragmentation of their allocators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from asyncrl.extensions.plan.activations import Training, activations, gather_buffer, logits, offloaded_activations
from asyncrl.extensions.plan.adapters import FUSED, Adapters
from asyncrl.extensions.plan.shapes import (
    FLOAT,
    ParallelLayout,
    RankParameters,
    Shape,
    held,
    of_critic,
    of_stage,
    parameters,
)
from asyncrl.extensions.plan.tensors import BYTES, Weight, tower_prefixes

MASTER, GRADIENT = FLOAT, FLOAT
"""Bytes per parameter."""
MOMENTS = 2
"""AdamW has two."""
CHECKPOINT = MASTER + MOMENTS * FLOAT
"""Bytes per parameter in a checkpoint, whatever the training precision (trainer/sharded.py), at most: moments in
bfloat16 take half."""
ROUTER = ".gate.weight"
"""Name suffix of a router's weight."""
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
    item, networks = BYTES[training.dtype], _networks(weights, shape, layout, training)
    counts = [held(network.trained, network.shape, layout, stage) for network in networks]
    own, every = counts[0].all, sum(count.all for count in counts)
    steps = [_stepped(count, layout) for count in counts]
    masters = MASTER if item < MASTER else 0  # float32 weights are their own masters
    moments = MOMENTS * BYTES[training.moments]
    last = stage == layout.pipeline - 1
    tower = shape.tower if stage == 0 and not training.tower else 0  # the networks share it
    matrices = [one for one in weights if one.layer is not None and len(one.shape) > 1]
    parts = {
        "weights": every * item,
        "frozen base": tower * item + sum(_base(network, layout, training, stage) for network in networks),
        "weights in FP8": 2 * held(matrices, shape, layout, stage).all * len(networks) * training.fp8,
        "gradients": every * GRADIENT,
        "masters": sum(steps) * masters,
        "moments": sum(steps) * moments,
        "frozen weights": own * item * training.frozen,
        "publish buckets": _sent(weights, shape, layout, training, stage) if training.publishes else 0,
        "activations": activations(shape, layout, training, stage),
        "logits": logits(shape, layout, training) if last else 0,
        "gather buffer": gather_buffer(shape, layout, training),
    }
    if training.offload:  # one network's states come back when nothing is left of a pass
        del parts["masters"], parts["moments"]
        returning = max(steps) * (masters + moments)
        parts["states beyond a pass"] = max(0, returning - parts["activations"] - parts["logits"])
    return parts


class _Network(NamedTuple):
    """A network with its optimizer."""

    trained: Sequence[Weight]
    frozen: Sequence[Weight]
    shape: Shape


def _networks(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> list[_Network]:
    """Return the policy, and the critic if there is one. With adapters each has a frozen base of its own."""
    adapters, networks = training.adapters, [(_published(weights, shape, training), shape)]
    if training.critic:
        networks.append((of_critic(weights, shape), replace(shape, tied=False)))
    if adapters is None:
        return [_Network(one, (), of) for one, of in networks]
    # Ranks that share a key-value head also share rows of queries: each holds the matrices of all (lora/layers.py).
    whole = FUSED[0] if layout.tensor > shape.key_shards(layout) else ()
    found = []
    for one, of in networks:
        head = [weight for weight in one if weight.name.startswith("value_head.")]
        frozen = [weight for weight in one if weight not in head]
        count = 1 if head else adapters.count  # there is one critic for all roles
        found.append(_Network([*adapters.matrices(one, whole) * count, *head], frozen, of))
    return found


def _published(weights: Sequence[Weight], shape: Shape, training: Training) -> Sequence[Weight]:
    """Return the weights with a vision tower that is trained, as one tensor."""
    return [*weights, Weight(tower_prefixes()[0], (shape.tower,), replicated=True)] if training.tower else weights


def _base(network: _Network, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes of a network's frozen weights, some of which may be quantized."""
    if training.adapters is None:
        return 0
    plain, packed = (held(part, network.shape, layout, stage).all for part in training.adapters.split(network.frozen))
    return plain * BYTES[training.dtype] + round(packed * (training.adapters.base_bytes or 0))


def _sent(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes of the buckets of a publish. Adapters that are sent by themselves need none, because their
    matrices leave one after the other (lora/publish.py). A quantized base goes through the usual ones first."""
    if training.adapters and training.versions and training.adapters.base_bytes is None:
        return 0
    sent = of_stage(_published(weights, shape, training), shape, layout, stage)
    whole = sum(one.elements for one in sent) * BYTES[training.dtype]
    return min(whole, 2 * training.bucket) if training.bucket else whole


def _stepped(mine: RankParameters, layout: ParallelLayout) -> int:
    """Return the number of parameters whose optimizer state a rank holds: Megatron's distributed optimizer shards it
    over the replicas, if there are any."""
    if layout.replicas == 1:
        return mine.all
    return -(-mine.dense // layout.replicas) + -(-mine.routed // layout.expert_replicas)


def offloaded(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of host memory in which a rank keeps what it offloads: masters and moments, activations."""
    here = replace(training, offload=False)
    stages = [_stage(weights, shape, layout, here, stage) for stage in range(layout.pipeline)]
    states = max(parts["masters"] + parts["moments"] for parts in stages) if training.offload else 0
    return states + max(offloaded_activations(shape, layout, training, stage) for stage in range(layout.pipeline))


def checkpoint_staging(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of host memory in which a rank stages its part of a checkpoint (trainer/sharded.py)."""
    networks = _networks(weights, shape, layout, training)
    stages = (
        sum(_stepped(held(network.trained, network.shape, layout, stage), layout) for network in networks)
        for stage in range(layout.pipeline)
    )
    return max(stages) * CHECKPOINT


def checkpoint_bytes(weights: Sequence[Weight], shape: Shape, training: Training) -> int:
    """Return the bytes of a checkpoint on disk, which holds what is trained."""
    return (
        sum(parameters(network.trained).all for network in _networks(weights, shape, ParallelLayout(), training))
        * CHECKPOINT
    )


def saved_bytes(weights: Sequence[Weight], training: Training) -> int:
    """Return the bytes of the HF folder of a version: the weights, or the adapters in float32."""
    if adapters := training.adapters:
        return parameters(adapters.matrices(weights)).all * adapters.count * FLOAT
    return parameters(weights).all * BYTES[training.dtype]


def packed_base_bytes(weights: Sequence[Weight], training: Training) -> int:
    """Return the bytes of the quantized weights, which a run stores once."""
    if training.adapters is None:
        return 0
    _, packed = training.adapters.split(weights)
    return round(parameters(packed).all * (training.adapters.base_bytes or 0))


def engine_rank(
    weights: Sequence[Weight],
    shape: Shape,
    *,
    tensor: int,
    dtype: str,
    tokens: int,
    replicas: int = 1,
    stages: int = 1,
    cache_dtype: str = "",
    linear_bytes: int | None = None,
    adapters: Adapters | None = None,
    slots: int = 0,
) -> dict[str, int]:
    """Return the bytes on one rank of an engine, of the last of its pipeline stages: its share of the weights, the KV
    cache of this many tokens (in each of the replicas of attention), and a pool of adapters, whose slots SGLang
    allocates at the start (max_loras_per_batch; its lora/mem_pool.py). With `linear_bytes`, each element of the layers'
    linear maps has so many; scales, less than a hundredth of that, are not counted."""
    share, layers = ParallelLayout(tensor=tensor, data=1, expert_tensor=tensor), -(-shape.layers // stages)
    item, attention = 1 if cache_dtype.startswith("fp8") else BYTES[dtype], tensor // replicas
    cache, parts = tokens * layers * shape.cached * item, min(attention, shape.cache_heads)

    def share_of(some: Sequence[Weight]) -> int:
        here = [one for one in some if one.layer is None or one.layer >= shape.layers - layers]
        cut = [one for one in here if ".self_attn." in one.name and not (one.replicated or one.whole)]
        ranks = [parts if one.name.endswith(KEYS) else attention for one in cut]
        repeated = sum(one.elements // by - one.elements // tensor for one, by in zip(cut, ranks, strict=True))
        return (held(here, shape, share, 0).all + repeated) * BYTES[dtype]

    linear = [one for one in weights if one.layer is not None and len(one.shape) > 1 and not one.name.endswith(ROUTER)]
    saved = share_of(linear) // BYTES[dtype] * (BYTES[dtype] - linear_bytes) if linear_bytes else 0
    tower = shape.tower // tensor * BYTES[dtype]
    pool = slots * share_of(adapters.served.matrices(weights)) if adapters else 0
    return {"weights": share_of(weights) - saved + tower, "KV cache": cache // parts, "adapters": pool}


def cache_that_fits(weights: Sequence[Weight], shape: Shape, room: float, **engine: Any) -> int:
    """Return the number of tokens whose KV cache fits beside an engine's weights and adapters, with `room` bytes on
    each rank; `engine` are further arguments of engine_rank."""
    rank = engine_rank(weights, shape, **engine, tokens=1_000_000)
    return int((room - rank["weights"] - rank["adapters"]) * 1_000_000 / rank["KV cache"])


AWAY = ("weights", "frozen base", "masters", "moments", "frozen weights")
"""Parts of a trainer rank that it keeps in host memory while engines use its GPU; gradients are dropped."""


def turns(trainer: dict[str, int], engine: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes on a GPU that a trainer rank and an engine rank use in turns (cluster.placement=colocated), by
    turn and purpose. The buckets of a publish stay throughout."""
    both = {f"engine's {name}": size for name, size in engine.items()}
    buckets = {"publish buckets": trainer["publish buckets"]}
    return {
        "generate": {**both, **buckets},
        "train": trainer,
        "publish": {
            **{name: size for name, size in both.items() if name != "engine's KV cache"},
            "weights": trainer["weights"],
            "frozen base": trainer["frozen base"],
            **buckets,
        },
    }


def away(trainer: dict[str, int]) -> int:
    """Return the bytes of host memory that a trainer rank needs while engines use its GPU."""
    return sum(trainer[name] for name in AWAY)
