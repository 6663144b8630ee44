"""What a rank of the trainer and of an engine holds in memory, by arithmetic. Bytes, unless a name says otherwise.

What is counted exactly is what stays: weights, gradients, masters and moments, as trainer/network.py and
trainer/optimizer.py hold them, and buckets of a publish, as weights/publish.py does. Activations are an estimate in the
manner of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), for the layers that trainer/model.py builds: no dropout
and no masks of it, gated MLPs, attention that keeps no matrix of scores, nothing computed twice; a test compares it
with what Megatron keeps on a CPU. Not counted: what libraries take for themselves, and the fragments of their
allocators.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"bfloat16": 2, "float32": 4}
FLOAT = 4
MASTER, MOMENTS, GRADIENT = FLOAT, 2 * FLOAT, FLOAT
"""Bytes of each parameter in float32; AdamW has two moments."""
CHECKPOINT = MASTER + MOMENTS
"""Bytes of each parameter in a checkpoint, whatever the precision of training (trainer/sharded.py)."""
LOGITS = 12
"""Bytes of each logit of a chunk where most are held: s, s - m and e^(s - m) in float32 (trainer/head.py)."""
WHOLE = ("norm.weight", "gate.weight", "e_score_correction_bias")
"""Ends of the names of tensors that every tensor-parallel rank holds whole: norms, and routers."""
KEYS = ("k_proj.weight", "v_proj.weight")
"""Ends of the names of tensors of which several ranks of an engine hold the same, where they are more than key-value
heads (weights/engine_layout.py)."""


class Weight(NamedTuple):
    """A tensor of an HF folder."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Its number, from 0; None outside of layers."""
        found = re.search(r"\.layers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def routed(self) -> bool:
        """Whether it belongs to a routed expert."""
        return ".experts." in self.name

    @property
    def whole(self) -> bool:
        """Whether tensor-parallel ranks do not share it."""
        return self.name.endswith(WHOLE)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of the trainer."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # of layers in a stage
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False

    @property
    def replicas(self) -> int:
        """Ranks that share the optimizer's state of a dense parameter."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """The same of a routed expert's."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    def stage_of(self, layer: int, layers: int) -> int:
        """The pipeline stage of a layer; under virtual pipelining they take turns."""
        return layer // (layers // (self.pipeline * self.chunks)) % self.pipeline


@dataclass(frozen=True)
class Shape:
    """What activations, logits and caches are made of: widths, in numbers per token."""

    layers: int
    hidden: int
    queries: int  # of all heads
    keys: int
    values: int
    inner: int  # of a dense MLP
    vocab: int
    tied: bool = False  # the output layer is the embedding
    rotated: int = 0  # of one head
    normed: bool = False  # queries and keys
    sparse: int = 0  # layers with routed experts
    chosen: int = 0  # experts of a token
    expert_inner: int = 0
    shared_inner: int = 0  # of the experts that take every token
    cached: int = 0  # of a token in a layer of the KV cache
    cache_heads: int = 1  # heads of it, which tensor-parallel ranks share, and repeat where they are more


class Held(NamedTuple):
    """Parameters of one rank."""

    dense: int
    routed: int

    @property
    def all(self) -> int:
        """Of both kinds."""
        return self.dense + self.routed


def counted(weights: Iterable[Weight], shape: Shape) -> list[Weight]:
    """Without what neither trainer nor engine loads: further layers (multi-token prediction), buffers of old
    checkpoints, and an output layer that is the embedding; and without the number for each expert that balances a
    router, which is no parameter."""
    return [
        one
        for one in weights
        if (one.layer is None or one.layer < shape.layers)
        and not one.name.endswith(("rotary_emb.inv_freq", "e_score_correction_bias"))
        and not (shape.tied and one.name == "lm_head.weight")
    ]


def held(weights: Sequence[Weight], shape: Shape, layout: Layout, stage: int) -> Held:
    """Parameters of the first rank of a pipeline stage, which holds no fewer than the others. `weights` as `counted`
    gives them."""
    dense = routed = 0
    for one in weights:
        if stage not in stages_of(one, shape, layout):
            continue
        if one.routed:
            routed += one.elements // layout.expert // layout.expert_tensor
        elif one.whole:
            dense += one.elements
        else:
            rows = -(-one.shape[0] // layout.tensor)  # a vocabulary is padded; all else divides
            dense += rows * math.prod(one.shape[1:])
    return Held(dense, routed)


def stages_of(weight: Weight, shape: Shape, layout: Layout) -> tuple[int, ...]:
    """The pipeline stages that hold a tensor: two of an embedding that is the output layer, whose first sends it."""
    first, last = 0, layout.pipeline - 1
    if weight.layer is not None:
        return (layout.stage_of(weight.layer, shape.layers),)
    if "embed_tokens" in weight.name:
        return (first, last) if shape.tied else (first,)
    return (last,)


@dataclass(frozen=True)
class Training:
    """What of the settings takes memory of a trainer rank."""

    dtype: str  # of weights and activations
    tokens: int  # of a micro-batch
    logit_rows: int
    frozen: int = 0  # further copies of the weights: of a reference, of the start
    critic: bool = False  # a second network with an optimizer
    bucket: int = 0  # bytes of a bucket, where two are all that a publish takes; 0: all buckets at once
    publishes: bool = True
    fused_norms: bool = False  # torch's on a GPU, which keep their input; on a CPU also the normed rows, in float32


def trainer_rank(weights: Sequence[Weight], shape: Shape, layout: Layout, training: Training) -> dict[str, int]:
    """Bytes by what they are for, of the rank that holds most."""
    stages = [_stage(weights, shape, layout, training, stage) for stage in range(layout.pipeline)]
    return max(stages, key=lambda parts: sum(parts.values()))


def _stage(weights: Sequence[Weight], shape: Shape, layout: Layout, training: Training, stage: int) -> dict[str, int]:
    mine, item = held(weights, shape, layout, stage), BYTES[training.dtype]
    networks = 1 + training.critic
    stepped = _stepped(mine, layout)
    sent = sum(one.elements for one in weights if stage in stages_of(one, shape, layout)) * item * training.publishes
    last = stage == layout.pipeline - 1
    return {
        "weights": mine.all * item * networks,
        "gradients": mine.all * GRADIENT * networks,
        "masters": stepped * MASTER * networks if item < MASTER else 0,  # in float32 a weight is its own master
        "moments": stepped * MOMENTS * networks,
        "frozen weights": mine.all * item * training.frozen,
        "publish buckets": min(sent, 2 * training.bucket) if training.bucket else sent,
        "activations": activations(shape, layout, training, stage),
        "logits": _logits(shape, layout, training) if last else 0,
    }


def _stepped(mine: Held, layout: Layout) -> int:
    """Parameters whose optimizer state a rank has: Megatron's distributed optimizer, where there are replicas."""
    if layout.replicas == 1:
        return mine.all
    return -(-mine.dense // layout.replicas) + -(-mine.routed // layout.expert_replicas)


def checkpoint_staging(weights: Sequence[Weight], shape: Shape, layout: Layout, *, critic: bool) -> int:
    """Bytes of host memory in which a rank keeps what it writes to a checkpoint (trainer/sharded.py)."""
    stages = (_stepped(held(weights, shape, layout, stage), layout) for stage in range(layout.pipeline))
    return max(stages) * CHECKPOINT * (1 + critic)


def activations(shape: Shape, layout: Layout, training: Training, stage: int) -> int:
    """Bytes that forward keeps for backward. The first of p stages holds p micro-batches at once (1F1B), every later
    one less; interleaved stages 1 + (p - 1) / (p v) as many (arXiv 2205.05198, section 4.2.3 and appendix C)."""
    p, v = layout.pipeline, layout.chunks
    in_flight = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
    sparse = shape.sparse / shape.layers
    per_token = (1 - sparse) * layer_bytes(shape, layout, training, routed=False)
    per_token += sparse * layer_bytes(shape, layout, training, routed=True)
    tokens = -(-training.tokens // layout.context)
    return round(tokens * per_token * shape.layers / p * in_flight)


def layer_bytes(shape: Shape, layout: Layout, training: Training, *, routed: bool) -> float:
    """Bytes per token that a layer keeps on a rank.

    Its two norms; of attention the projections, rotated queries and keys with their angles, and what it gives; of an
    MLP gate, up, and their product. A routed expert's rows count for each expert of a token, as if all had equal loads.
    """
    t, rows, item = layout.tensor, layout.tensor if layout.sequence else 1, BYTES[training.dtype]
    norm = item if training.fused_norms else 2 * FLOAT  # what backward needs of its input
    kept = 2 * (item + norm) * shape.hidden / rows
    kept += item * (2 * shape.queries + 2 * shape.keys + shape.values + shape.queries) / t + 4 * item * shape.rotated
    if shape.normed and not training.fused_norms:
        kept += norm * (shape.queries + shape.keys) / t
    if not routed:
        return kept + item * 3 * shape.inner / t
    copies = shape.chosen * layout.expert_tensor / rows
    of_experts = copies * (2 * shape.hidden + 3 * shape.expert_inner / layout.expert_tensor)
    return kept + item * (of_experts + 3 * shape.shared_inner / t)


def _logits(shape: Shape, layout: Layout, training: Training) -> int:
    """The chunk, and the product that is added to the gradient of the output layer."""
    columns = -(-shape.vocab // layout.tensor)
    rows = min(training.logit_rows, -(-training.tokens // layout.context))
    return rows * columns * LOGITS + columns * shape.hidden * BYTES[training.dtype]


def engine_rank(
    weights: Sequence[Weight], shape: Shape, *, tensor: int, dtype: str, tokens: int, cache_dtype: str = ""
) -> dict[str, int]:
    """Bytes of one rank of an engine: its share of the weights, and the KV cache of so many tokens."""
    share = Layout(tensor=tensor, data=1, expert_tensor=tensor)
    item = 1 if cache_dtype.startswith("fp8") else BYTES[dtype]
    cache, parts = tokens * shape.layers * shape.cached * item, min(tensor, shape.cache_heads)
    repeated = sum(one.elements // parts - one.elements // tensor for one in weights if one.name.endswith(KEYS))
    return {
        "weights": (held(weights, shape, share, 0).all + repeated) * BYTES[dtype],
        "KV cache": cache // parts,
    }


def buckets(sizes: Iterable[int], limit: int) -> int:
    """How many of at most `limit` bytes; a larger tensor travels alone, none is split."""
    return len(packed(sizes, limit))


def packed(sizes: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """The same, in their order: of each its bytes, and how many tensors it holds (as weights/bucket.py plans them)."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        filled, count = found[-1] if found else (limit, 0)
        if not found or filled + size > limit:
            found.append((size, 1))
        else:
            found[-1] = (filled + size, count + 1)
    return found


def parameters(weights: Iterable[Weight]) -> Held:
    """Of the whole model."""
    found = list(weights)
    routed = sum(one.elements for one in found if one.routed)
    return Held(sum(one.elements for one in found) - routed, routed)


def active(weights: Sequence[Weight], shape: Shape) -> float:
    """Parameters that multiply each token: without the embedding, and of routed experts those that it chooses."""
    held = parameters(weights)
    if not shape.tied:
        held = held._replace(dense=held.dense - shape.vocab * shape.hidden)
    experts = held.routed / (3 * shape.hidden * shape.expert_inner * shape.sparse) if held.routed else 1
    return held.dense + held.routed * shape.chosen / experts
