"""Memory of a trainer rank and of an engine rank, computed from shapes. All sizes are in bytes unless a name says
otherwise.

Persistent memory is counted exactly: weights, gradients, master weights and moments as in trainer/network.py and
trainer/optimizer.py, and the buckets of a publish as in weights/publish.py. Activations are estimated in the manner of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for the layers that trainer/model.py builds: no dropout and no
dropout masks, gated MLPs, attention that does not store the score matrix, no recomputation; a test compares the
estimate with what Megatron keeps on a CPU. Not counted: the libraries' own memory, and fragmentation of their
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
"""Bytes per parameter in float32; AdamW has two moments."""
CHECKPOINT = MASTER + MOMENTS
"""Bytes per parameter in a checkpoint, whatever the training precision (trainer/sharded.py)."""
LOGITS = 12
"""Peak bytes per logit of a chunk: s, s - m and e^(s - m) in float32 (trainer/head.py)."""
WHOLE = ("norm.weight", "gate.weight", "e_score_correction_bias")
"""Name suffixes of tensors that every tensor-parallel rank holds entirely: norms and routers."""
KEYS = ("k_proj.weight", "v_proj.weight")
"""Name suffixes of tensors that engine ranks hold replicated if there are more ranks than key-value heads
(weights/engine_layout.py)."""


class Weight(NamedTuple):
    """A tensor of an HF folder."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Return the layer number, from 0; None outside of layers."""
        found = re.search(r"\.layers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def routed(self) -> bool:
        """Return whether it belongs to a routed expert."""
        return ".experts." in self.name

    @property
    def whole(self) -> bool:
        """Return whether tensor-parallel ranks hold it entirely instead of sharding it."""
        return self.name.endswith(WHOLE)


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism of the trainer."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # chunks of layers per stage (virtual pipeline)
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False

    @property
    def replicas(self) -> int:
        """Return the number of ranks that shard the optimizer state of a dense parameter."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that shard the optimizer state of a routed expert's parameter."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    def stage_of(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer; under virtual pipelining, chunks alternate between stages."""
        return layer // (layers // (self.pipeline * self.chunks)) % self.pipeline


@dataclass(frozen=True)
class Shape:
    """Dimensions that determine activations, logits and caches: widths, in numbers per token."""

    layers: int
    hidden: int
    queries: int  # over all heads
    keys: int
    values: int
    inner: int  # MLP width of a dense layer
    vocab: int
    tied: bool = False  # whether the output layer is the embedding
    rotated: int = 0  # rotary dimensions per head
    normed: bool = False  # whether queries and keys are normalized
    sparse: int = 0  # number of layers with routed experts
    chosen: int = 0  # experts per token
    expert_inner: int = 0
    shared_inner: int = 0  # total width of the shared experts
    cached: int = 0  # KV cache numbers per token and layer
    cache_heads: int = 1  # KV heads, sharded over tensor-parallel ranks and replicated if there are more ranks


class RankParameters(NamedTuple):
    """Number of parameters on one rank."""

    dense: int
    routed: int

    @property
    def all(self) -> int:
        """Return the total."""
        return self.dense + self.routed


def counted(weights: Iterable[Weight], shape: Shape) -> list[Weight]:
    """Return the weights that trainer and engine load. This excludes further layers (multi-token prediction), buffers
    of old checkpoints, an output layer that is the embedding, and the router's load-balancing bias, which is not a
    parameter."""
    return [
        one
        for one in weights
        if (one.layer is None or one.layer < shape.layers)
        and not one.name.endswith(("rotary_emb.inv_freq", "e_score_correction_bias"))
        and not (shape.tied and one.name == "lm_head.weight")
    ]


def held(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, stage: int) -> RankParameters:
    """Return the number of parameters on the first rank of a pipeline stage, which holds at least as many as the
    others. `weights` is a result of `counted`."""
    dense = routed = 0
    for one in weights:
        if stage not in stages_of(one, shape, layout):
            continue
        if one.routed:
            routed += one.elements // layout.expert // layout.expert_tensor
        elif one.whole:
            dense += one.elements
        else:
            rows = -(-one.shape[0] // layout.tensor)  # the vocabulary is padded; everything else divides evenly
            dense += rows * math.prod(one.shape[1:])
    return RankParameters(dense, routed)


def stages_of(weight: Weight, shape: Shape, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the pipeline stages that hold a tensor. A tied embedding is on two stages, of which the first publishes
    it."""
    first, last = 0, layout.pipeline - 1
    if weight.layer is not None:
        return (layout.stage_of(weight.layer, shape.layers),)
    if "embed_tokens" in weight.name:
        return (first, last) if shape.tied else (first,)
    return (last,)


@dataclass(frozen=True)
class Training:
    """The settings that determine the memory of a trainer rank."""

    dtype: str  # weights and activations
    tokens: int  # per micro-batch
    logit_rows: int
    frozen: int = 0  # number of frozen copies of the weights: reference, initial weights
    critic: bool = False  # whether there is a critic, a second network with its optimizer
    bucket: int = 0  # bytes of a bucket if a publish uses two; 0: all buckets at once
    publishes: bool = True
    fused_norms: bool = False  # fused norms (GPU) keep only their input; else also the output in float32


def trainer_rank(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training) -> dict[str, int]:
    """Return the bytes on the rank that holds most, by purpose."""
    stages = [_stage(weights, shape, layout, training, stage) for stage in range(layout.pipeline)]
    return max(stages, key=lambda parts: sum(parts.values()))


def _stage(
    weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, training: Training, stage: int
) -> dict[str, int]:
    mine, item = held(weights, shape, layout, stage), BYTES[training.dtype]
    networks = 1 + training.critic
    stepped = _stepped(mine, layout)
    sent = sum(one.elements for one in weights if stage in stages_of(one, shape, layout)) * item * training.publishes
    last = stage == layout.pipeline - 1
    return {
        "weights": mine.all * item * networks,
        "gradients": mine.all * GRADIENT * networks,
        "masters": stepped * MASTER * networks if item < MASTER else 0,  # float32 weights are their own masters
        "moments": stepped * MOMENTS * networks,
        "frozen weights": mine.all * item * training.frozen,
        "publish buckets": min(sent, 2 * training.bucket) if training.bucket else sent,
        "activations": activations(shape, layout, training, stage),
        "logits": _logits(shape, layout, training) if last else 0,
    }


def _stepped(mine: RankParameters, layout: ParallelLayout) -> int:
    """Return the number of parameters whose optimizer state a rank holds: Megatron's distributed optimizer shards it
    over the replicas, if there are any."""
    if layout.replicas == 1:
        return mine.all
    return -(-mine.dense // layout.replicas) + -(-mine.routed // layout.expert_replicas)


def checkpoint_staging(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, *, critic: bool) -> int:
    """Return the bytes of host memory in which a rank stages its part of a checkpoint (trainer/sharded.py)."""
    stages = (_stepped(held(weights, shape, layout, stage), layout) for stage in range(layout.pipeline))
    return max(stages) * CHECKPOINT * (1 + critic)


def activations(shape: Shape, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes that forward keeps for backward. With 1F1B, the first of p stages holds p micro-batches at once
    and each later stage one less; interleaved stages hold 1 + (p - 1) / (p v) times p (arXiv 2205.05198, section 4.2.3
    and appendix C)."""
    p, v = layout.pipeline, layout.chunks
    in_flight = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
    sparse = shape.sparse / shape.layers
    per_token = (1 - sparse) * layer_bytes(shape, layout, training, routed=False)
    per_token += sparse * layer_bytes(shape, layout, training, routed=True)
    tokens = -(-training.tokens // layout.context)
    return round(tokens * per_token * shape.layers / p * in_flight)


def layer_bytes(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the bytes per token that a layer keeps on a rank.

    Counted are its two norms; the projections of attention, rotated queries and keys with their angles, and its output;
    gate, up and their product in an MLP. The rows of a routed expert count once per expert of a token, assuming equal
    loads.
    """
    t, rows, item = layout.tensor, layout.tensor if layout.sequence else 1, BYTES[training.dtype]
    norm = item if training.fused_norms else 2 * FLOAT  # of its input, for backward
    kept = 2 * (item + norm) * shape.hidden / rows
    kept += item * (2 * shape.queries + 2 * shape.keys + shape.values + shape.queries) / t + 4 * item * shape.rotated
    if shape.normed and not training.fused_norms:
        kept += norm * (shape.queries + shape.keys) / t
    if not routed:
        return kept + item * 3 * shape.inner / t
    copies = shape.chosen * layout.expert_tensor / rows
    of_experts = copies * (2 * shape.hidden + 3 * shape.expert_inner / layout.expert_tensor)
    return kept + item * (of_experts + 3 * shape.shared_inner / t)


def _logits(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of one chunk of logits and of the product that is added to the output layer's gradient."""
    columns = -(-shape.vocab // layout.tensor)
    rows = min(training.logit_rows, -(-training.tokens // layout.context))
    return rows * columns * LOGITS + columns * shape.hidden * BYTES[training.dtype]


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


def buckets(sizes: Iterable[int], limit: int) -> int:
    """Return the number of buckets of at most `limit` bytes; a larger tensor gets a bucket of its own, and none is
    split."""
    return len(packed(sizes, limit))


def packed(sizes: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of tensors of each bucket, in order, as weights/bucket.py plans them."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        filled, count = found[-1] if found else (limit, 0)
        if not found or filled + size > limit:
            found.append((size, 1))
        else:
            found[-1] = (filled + size, count + 1)
    return found


def parameters(weights: Iterable[Weight]) -> RankParameters:
    """Return the number of parameters of the whole model."""
    found = list(weights)
    routed = sum(one.elements for one in found if one.routed)
    return RankParameters(sum(one.elements for one in found) - routed, routed)


def active(weights: Sequence[Weight], shape: Shape) -> float:
    """Return the number of parameters that each token is multiplied with: without the embedding, and only the routed
    experts that it selects."""
    held = parameters(weights)
    if not shape.tied:
        held = held._replace(dense=held.dense - shape.vocab * shape.hidden)
    experts = held.routed / (3 * shape.hidden * shape.expert_inner * shape.sparse) if held.routed else 1
    return held.dense + held.routed * shape.chosen / experts
