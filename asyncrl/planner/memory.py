"""Memory of a trainer rank and of an engine rank, computed from shapes. All sizes are in bytes unless a name says
otherwise.

Persistent memory is counted exactly: weights, gradients, master weights and moments as in trainer/network.py and
trainer/optimizer.py, and the buckets of a publish as in weights/publish.py. Activations are estimated in the manner of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for the layers that trainer/model.py builds: no dropout and no
dropout masks, gated MLPs, attention that does not store the score matrix; a test compares the estimate with what
Megatron keeps on a CPU. Not counted: the libraries' own memory, fragmentation of their allocators, and the block masks
of attention (trainer/tree_attention.py), which take 1 KB for every million pairs of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncrl.parallel import PipelineSplit

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
    split: PipelineSplit | None = None  # of the layers over stages; None: evenly
    whole: tuple[str, ...] = ()  # endings of further names that tensor-parallel ranks hold entirely

    @property
    def replicas(self) -> int:
        """Return the number of ranks that shard the optimizer state of a dense parameter."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that shard the optimizer state of a routed expert's parameter."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    def layers_of(self, layers: int) -> list[list[range]]:
        """Return the layers of each chunk of each pipeline stage."""
        return (self.split or PipelineSplit(self.pipeline, self.chunks)).chunk_layers(layers)

    def stage_of(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer; under virtual pipelining, chunks alternate between stages."""
        stages = enumerate(self.layers_of(layers))
        return next(stage for stage, chunks in stages if any(layer in chunk for chunk in chunks))


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
        elif one.whole or one.name.endswith(layout.whole):
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
class Recompute:
    """Activations that are recomputed in backward; the fields are those of trainer.recompute."""

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ()

    def drops(self, module: str) -> bool:
        """Return whether a part of each layer is recomputed by itself."""
        return self.granularity == "selective" and module in self.modules


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
    recompute: Recompute = Recompute()
    offload: bool = False  # whether masters and moments are in host memory except during a step
    fp8: bool = False  # whether layers keep their matrices in FP8 too, by rows and by columns


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
    matrices = [one for one in weights if one.layer is not None and len(one.shape) > 1]
    parts = {
        "weights": mine.all * item * networks,
        "weights in FP8": 2 * held(matrices, shape, layout, stage).all * networks * training.fp8,
        "gradients": mine.all * GRADIENT * networks,
        "masters": stepped * MASTER * networks if item < MASTER else 0,  # float32 weights are their own masters
        "moments": stepped * MOMENTS * networks,
        "frozen weights": mine.all * item * training.frozen,
        "publish buckets": min(sent, 2 * training.bucket) if training.bucket else sent,
        "activations": activations(shape, layout, training, stage),
        "logits": _logits(shape, layout, training) if last else 0,
    }
    if training.offload:  # one network's states come back when nothing is left of a pass
        returning = (parts.pop("masters") + parts.pop("moments")) // networks
        parts["states beyond a pass"] = max(0, returning - parts["activations"] - parts["logits"])
    return parts


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
    stages = (_stepped(held(weights, shape, layout, stage), layout) for stage in range(layout.pipeline))
    return max(stages) * CHECKPOINT * (1 + critic)


def activations(shape: Shape, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes that forward keeps for backward, and that backward recomputes at once. With 1F1B, the first of p
    stages holds p micro-batches at once and each later stage one less; interleaved stages hold 1 + (p - 1) / (p v)
    times p (arXiv 2205.05198, section 4.2.3 and appendix C)."""
    p, v = layout.pipeline, layout.chunks
    in_flight = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
    whole = _mean_layer(shape, layout, replace(training, recompute=Recompute()))
    kept, again = _mean_layer(shape, layout, training), 0.0
    layers, recompute = sum(map(len, layout.layers_of(shape.layers)[stage])), training.recompute
    if recompute.granularity == "selective":
        again = whole - kept
    elif recompute.granularity == "full":
        of_input = BYTES[training.dtype] * shape.hidden / (layout.tensor if layout.sequence else 1)
        uniform = recompute.method == "uniform"
        redone = 1.0 if uniform else min(1.0, recompute.num_layers / max(1, layers / v))
        kept = (1 - redone) * whole + redone * of_input / (recompute.num_layers if uniform else 1)
        again = whole * (recompute.num_layers if uniform else 1)
    last = _norm_bytes(shape, layout, training) if stage == p - 1 else 0.0
    tokens = -(-training.tokens // layout.context)
    return round(tokens * (kept * layers * in_flight + again + last))


def _mean_layer(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes per token that forward keeps of a layer, on average over dense layers and those with experts."""
    sparse = shape.sparse / shape.layers
    dense, routed = (layer_bytes(shape, layout, training, routed=one) for one in (False, True))
    return (1 - sparse) * dense + sparse * routed


def layer_bytes(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the bytes per token that a layer keeps on a rank, except of the modules that are recomputed by themselves.

    Counted are its two norms; the projections of attention, rotated queries and keys with their angles, and its output;
    gate, up and their product in an MLP. The rows of a routed expert count once per expert of a token, assuming equal
    loads. Attention that is recomputed drops only what context parallelism gathers.
    """
    t, rows, item = layout.tensor, layout.tensor if layout.sequence else 1, BYTES[training.dtype]
    drops = training.recompute.drops
    kept = 2 * (item * shape.hidden / rows if drops("layernorm") else _norm_bytes(shape, layout, training))
    both = drops("mla_up_proj") and drops("core_attn")  # attention alone would keep copies
    projected = 0 if both else 2 * shape.queries + 2 * shape.keys + shape.values
    if layout.context > 1 and not drops("core_attn"):  # the keys and values of all ranks
        projected += (layout.context - 1) * (shape.keys + shape.values)
    kept += item * (projected + shape.queries) / t + 4 * item * shape.rotated
    if shape.normed and not training.fused_norms:
        kept += 2 * FLOAT * (shape.queries + shape.keys) / t
    return kept + item * _mlp(shape, layout, training.recompute, routed=routed)


def _norm_bytes(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes per token that a norm keeps: its output, and its input for backward."""
    item, rows = BYTES[training.dtype], layout.tensor if layout.sequence else 1
    return (item + (item if training.fused_norms else 2 * FLOAT)) * shape.hidden / rows


def _mlp(shape: Shape, layout: ParallelLayout, recompute: Recompute, *, routed: bool) -> float:
    """Return the numbers per token that an MLP keeps besides its input."""
    t, rows = layout.tensor, layout.tensor if layout.sequence else 1
    if recompute.drops("moe" if routed else "mlp"):
        return 0.0
    if not routed:
        return 3 * shape.inner / t
    copies = shape.chosen * layout.expert_tensor / rows
    of_activation = (2 if recompute.drops("moe_act") else 3) * shape.expert_inner / layout.expert_tensor
    shared = 0 if recompute.drops("shared_experts") else 3 * shape.shared_inner / t
    return copies * (2 * shape.hidden + of_activation) + shared


def _logits(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of one chunk of logits. (The gradient of the output layer is added in place.)"""
    rows = min(training.logit_rows, -(-training.tokens // layout.context))
    return rows * -(-shape.vocab // layout.tensor) * LOGITS


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
