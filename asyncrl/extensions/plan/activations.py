"""Estimated bytes of activations: what forward keeps for backward, and what backward recomputes.

They are estimated in the manner of Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for the layers that
trainer/model.py builds: no dropout and no dropout masks, gated MLPs, attention that does not store the score matrix; a
test compares the estimate with what Megatron keeps on a CPU. Not counted: the block masks of attention
(trainer/tree_attention.py), which take 1 KB for every million pairs of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from asyncrl.extensions.plan.adapters import Adapters
from asyncrl.extensions.plan.shapes import FLOAT, ParallelLayout, Shape
from asyncrl.extensions.plan.tensors import BYTES

ATTENTION_IN = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
LATENT_IN = ("q_b_proj", "kv_b_proj")
MLP_IN, EXPERT_IN = ("gate_proj", "up_proj"), ("gate_up_proj",)
"""Projections that read a norm's output."""
ROUTER, CHOICE = 3 * FLOAT, 2 * 8
"""Bytes per token of each expert's scores and probabilities, and of the numbers of each expert of a token."""
LOGITS = 12
"""Peak bytes per logit of a chunk: s, s - m and e^(s - m) in float32 (trainer/head.py)."""


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
    moments: str = "float32"  # number format of the optimizer's moments
    offload: bool = False  # whether masters and moments are in host memory except during a step
    layers_held: float = math.inf  # layers whose activations are on the device; others are in host memory
    fp8: bool = False  # whether layers keep their matrices in FP8 too, by rows and by columns
    tower: bool = False  # whether a vision tower is trained
    adapters: Adapters | None = None  # what is trained in place of the weights, which are frozen
    versions: bool = False  # whether a publish sends the adapters alone, not the merged weights

    def keeps_input(self, *names: str) -> bool:
        """Return whether the input of a layer with these projections is kept, for gradients of weights or adapters."""
        return self.adapters is None or self.adapters.on(*names)


def activations(shape: Shape, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes that forward keeps for backward, and that backward recomputes at once. With 1F1B, the first of p
    stages holds p micro-batches at once and each later stage one less; interleaved stages hold 1 + (p - 1) / (p v)
    times p (arXiv 2205.05198, section 4.2.3 and appendix C)."""
    return _activations(shape, layout, training, stage, training.layers_held)


def offloaded_activations(shape: Shape, layout: ParallelLayout, training: Training, stage: int) -> int:
    """Return the bytes of activations in host memory."""
    whole = _activations(shape, layout, training, stage, math.inf)
    return whole - activations(shape, layout, training, stage)


def _activations(shape: Shape, layout: ParallelLayout, training: Training, stage: int, most: float) -> int:
    """Return the bytes of activations of which at most `most` layers are on the device."""
    p, v = layout.pipeline, layout.chunks
    in_flight = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
    whole = _mean_layer(shape, layout, replace(training, recompute=Recompute()))
    kept = _mean_layer(shape, layout, training)
    layers, recompute = sum(map(len, layout.layers_of(shape.layers)[stage])), training.recompute
    if recompute.granularity == "full":
        of_input = BYTES[training.dtype] * shape.hidden / (layout.tensor if layout.sequence else 1)
        uniform = recompute.method == "uniform"
        redone = 1.0 if uniform else min(1.0, recompute.num_layers / max(1, layers / v))
        kept = (1 - redone) * whole + redone * of_input / (recompute.num_layers if uniform else 1)
    final = replace(training, recompute=Recompute())
    last = _norm_bytes(shape.hidden, layout, final) if stage == p - 1 else 0.0
    tokens = -(-training.tokens // layout.context)
    held = min(most, layers * in_flight)
    stacks = _stacked(shape, layout, training) * (1 if recompute.granularity == "full" else held)
    return round(tokens * (kept * held + last) + stacks) + recomputed(shape, layout, training)


def recomputed(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes that backward recomputes at once."""
    whole, recompute = _mean_layer(shape, layout, replace(training, recompute=Recompute())), training.recompute
    again = 0.0
    if recompute.granularity == "selective":
        again = whole - _mean_layer(shape, layout, training)
    elif recompute.granularity == "full":
        again = whole * (recompute.num_layers if recompute.method == "uniform" else 1)
    return round(-(-training.tokens // layout.context) * again)


def _mean_layer(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes per token that forward keeps of a layer, on average over dense layers and those with experts."""
    sparse = shape.sparse / shape.layers
    dense, routed = (layer_bytes(shape, layout, training, routed=one) for one in (False, True))
    return (1 - sparse) * dense + sparse * routed


def layer_bytes(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the bytes per token that a layer keeps on a rank, except of the modules that are recomputed by themselves.

    Counted are its norms, attention, the router, its MLP, and adapters. The rows of a routed expert count once per
    expert of a token, assuming equal loads. Attention that is recomputed drops only what context parallelism gathers.
    """
    item, keeps = BYTES[training.dtype], training.keeps_input
    inner = (*EXPERT_IN, *MLP_IN) if routed else MLP_IN
    kept = sum(_norms_bytes(shape, layout, training, *of) for of in ((ATTENTION_IN, "attention"), (inner, "mlp")))
    kept += item * _attention(shape, layout, training) + _of_adapters(shape, layout, training, routed=routed)
    kept += _norm_bytes(shape.latent, layout, replace(training, recompute=Recompute()), keeps(*LATENT_IN))
    if shape.normed and (shape.wide or not training.fused_norms):
        kept += _norm_input(replace(training, fused_norms=False)) * (
            shape.queries / layout.tensor + shape.keys / shape.key_shards(layout)
        )
    if routed and not training.recompute.drops("moe"):
        kept += (ROUTER * shape.experts + CHOICE * shape.chosen) / (layout.tensor if layout.sequence else 1)
    return kept + item * _mlp(shape, layout, training, routed=routed)


def _norm_input(training: Training) -> int:
    """Return the bytes of a number that a norm keeps of its input: a fused one that number, another the number in
    float32, and normalized, unless the norm's own weights are frozen."""
    return BYTES[training.dtype] if training.fused_norms else FLOAT * (2 if training.adapters is None else 1)


def _norm_bytes(width: int, layout: ParallelLayout, training: Training, output: bool = True) -> float:
    """Return the bytes per token that a norm keeps: its input for backward, and its output where the next layer needs
    it. One that is recomputed keeps the input of the layer in its own format."""
    item, rows = BYTES[training.dtype], layout.tensor if layout.sequence else 1
    if training.recompute.drops("layernorm"):
        return item * width / rows
    return (_norm_input(training) + item * output) * width / rows


def _norms_bytes(
    shape: Shape, layout: ParallelLayout, training: Training, first: tuple[str, ...], module: str
) -> float:
    """Return the bytes per token that the norms of attention or of an MLP keep, with the input of its `first` layers:
    what a norm before it gives, or else the hidden states themselves. What a norm after it gives is only added to them,
    and is recomputed with the module."""
    rows, output = layout.tensor if layout.sequence else 1, training.keeps_input(*first)
    kept = BYTES[training.dtype] * output * shape.hidden / rows
    if shape.norm_before:
        kept = _norm_bytes(shape.hidden, layout, training, output)
    after = shape.norm_after and not training.recompute.drops(module)
    return kept + _norm_input(training) * after * shape.hidden / rows


def _attention(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the numbers per token that attention keeps besides its input: the projections, rotated queries and keys
    with their angles, and its output. Latent attention copies what it rotates and keeps no projections. On a CPU it
    pads values and output to the width of keys, and keeps the unpadded output too."""
    t, shards, drops = layout.tensor, shape.key_shards(layout), training.recompute.drops
    both = shape.keys + shape.values
    if shape.latent:
        padded = 0 if training.fused_norms else shape.keys
        output = shape.values / t
        projected = (shape.queries + shape.keys + (2 * padded or shape.values)) / t
    else:
        output = shape.queries / t
        projected = output + shape.keys / shards  # rotated
        projected += (shape.queries + both) / (t if t == shards else 1)  # all ranks', of which each takes its heads
    if drops("mla_up_proj") and drops("core_attn"):  # attention alone would keep copies
        projected = 0
    if layout.context > 1 and not drops("core_attn"):  # the keys and values of all ranks
        projected += (layout.context - 1) * both / shards
    return projected + output + 4 * shape.rotated


def _mlp(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the numbers per token that an MLP keeps besides its input: gate, up, what their activation keeps, and
    their product; of routed experts the input that is copied for each, and the product also before it is scaled; of
    shared experts (Megatron's own MLP) also the activated gate and what it multiplies."""
    t, rows, recompute = layout.tensor, layout.tensor if layout.sequence else 1, training.recompute
    product = int(training.keeps_input("down_proj"))  # the input of the last layer
    if recompute.drops("moe" if routed else "mlp"):
        return 0.0
    if not routed:
        return (2 + shape.activating + product) * shape.inner / t
    copies, hidden = shape.chosen * layout.expert_tensor / rows, shape.hidden * training.keeps_input(*EXPERT_IN)
    inner = 2 if recompute.drops("moe_act") else 3 + shape.activating + product
    of_activation = inner * shape.expert_inner / layout.expert_tensor
    shared = 0 if recompute.drops("shared_experts") else (4 + product) * shape.shared_inner / t
    return copies * (hidden + of_activation) + shared


def _of_adapters(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the bytes per token that the adapters of a layer keep besides their input: what is between their matrices,
    of all rows for those of column-parallel layers; and with dropout, what is dropped of their input."""
    adapters, t, rows = training.adapters, layout.tensor, layout.tensor if layout.sequence else 1
    if adapters is None:
        return 0.0
    output, copies = shape.values if shape.latent else shape.queries, shape.chosen * layout.expert_tensor / rows
    attention = (*ATTENTION_IN[:3], *(ATTENTION_IN[3:] if shape.latent else ()), *(LATENT_IN if shape.latent else ()))
    layers = [(attention, 1.0, shape.hidden / rows), (("o_proj",), 1 / rows, output / t)]
    if routed:
        inner = shape.expert_inner / layout.expert_tensor
        layers += [(EXPERT_IN, copies, copies * shape.hidden), (("down_proj",), copies, copies * inner)]
    if not routed or shape.shared_inner:
        inner = (shape.shared_inner if routed else shape.inner) / t
        layers += [(MLP_IN, 1.0, shape.hidden / rows), (("down_proj",), 1 / rows, inner)]
    item, kept = BYTES[training.dtype], 0.0
    for names, tokens, width in layers:
        count = sum(adapters.on(name) for name in names)
        kept += item * adapters.rank * count * tokens + width * (adapters.dropout and count > 0)
    return kept


def _stacked(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes of the stacked matrices of several adapters on one layer, which a micro-batch keeps of each
    layer."""
    if training.adapters is None:
        return 0.0
    out = 0 if shape.latent else shape.queries + shape.keys + shape.values
    inner = (1 - shape.sparse / shape.layers) * shape.inner + shape.sparse / shape.layers * shape.shared_inner
    found = 0.0
    for names, outputs in ((ATTENTION_IN[:3], out), (MLP_IN, 2 * inner)):
        ranks = training.adapters.rank * sum(training.adapters.on(name) for name in names)
        found += ranks * (shape.hidden + outputs / layout.tensor) if outputs else 0
    return found * BYTES[training.dtype]


def logits(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of one chunk of logits. (The gradient of the output layer is added in place.) They are gone when
    backward recomputes a layer, which may take the same memory."""
    rows = min(training.logit_rows, -(-training.tokens // layout.context))
    return max(0, rows * -(-shape.vocab // layout.tensor) * LOGITS - recomputed(shape, layout, training))


def gather_buffer(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of the buffer into which Megatron gathers the hidden states of all rows under sequence
    parallelism, and which it keeps. Its function for frozen weights allocates anew."""
    if not layout.sequence or layout.tensor == 1 or training.adapters:
        return 0
    return -(-training.tokens // layout.context) * shape.hidden * BYTES[training.dtype]
