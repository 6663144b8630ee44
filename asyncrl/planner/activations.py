"""Estimated bytes of activations: what forward keeps for backward, and what backward recomputes.

They are estimated in the manner of Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for the layers that
trainer/model.py builds: no dropout and no dropout masks, gated MLPs, attention that does not store the score matrix; a
test compares the estimate with what Megatron keeps on a CPU. Not counted: the block masks of attention
(trainer/tree_attention.py), which take 1 KB for every million pairs of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.planner.shapes import BYTES, FLOAT, ParallelLayout, Shape

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
    offload: bool = False  # whether masters and moments are in host memory except during a step
    fp8: bool = False  # whether layers keep their matrices in FP8 too, by rows and by columns


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
    last = _norm_bytes(shape.hidden, layout, training) if stage == p - 1 else 0.0
    tokens = -(-training.tokens // layout.context)
    return round(tokens * (kept * layers * in_flight + again + last))


def _mean_layer(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes per token that forward keeps of a layer, on average over dense layers and those with experts."""
    sparse = shape.sparse / shape.layers
    dense, routed = (layer_bytes(shape, layout, training, routed=one) for one in (False, True))
    return (1 - sparse) * dense + sparse * routed


def layer_bytes(shape: Shape, layout: ParallelLayout, training: Training, *, routed: bool) -> float:
    """Return the bytes per token that a layer keeps on a rank, except of the modules that are recomputed by themselves.

    Counted are its two norms, attention, and its MLP. The rows of a routed expert count once per expert of a token,
    assuming equal loads. Attention that is recomputed drops only what context parallelism gathers.
    """
    rows, item = layout.tensor if layout.sequence else 1, BYTES[training.dtype]
    of_norm = item * shape.hidden / rows if training.recompute.drops("layernorm") else None
    kept = 2 * (_norm_bytes(shape.hidden, layout, training) if of_norm is None else of_norm)
    kept += item * _attention(shape, layout, training) + _norm_bytes(shape.latent, layout, training)
    if shape.normed and not training.fused_norms:
        kept += 2 * FLOAT * (shape.queries + shape.keys) / layout.tensor
    return kept + item * _mlp(shape, layout, training.recompute, routed=routed)


def _norm_bytes(width: int, layout: ParallelLayout, training: Training) -> float:
    """Return the bytes per token that a norm keeps: its output, and its input for backward."""
    item, rows = BYTES[training.dtype], layout.tensor if layout.sequence else 1
    return (item + (item if training.fused_norms else 2 * FLOAT)) * width / rows


def _attention(shape: Shape, layout: ParallelLayout, training: Training) -> float:
    """Return the numbers per token that attention keeps besides its input: the projections, rotated queries and keys
    with their angles, and its output. Latent attention copies what it rotates and keeps no projections. On a CPU it
    pads values and output to the width of keys (backends/cpu/pack_attention.py), and keeps the unpadded output too."""
    drops, padded = training.recompute.drops, 0 if training.fused_norms else shape.keys
    if shape.latent:
        output = shape.values
        projected = shape.queries + shape.keys + (2 * padded or shape.values)
    else:
        output = shape.queries
        projected = 2 * shape.queries + 2 * shape.keys + shape.values
    if drops("mla_up_proj") and drops("core_attn"):  # attention alone would keep copies
        projected = 0
    if layout.context > 1 and not drops("core_attn"):  # the keys and values of all ranks
        projected += (layout.context - 1) * (shape.keys + shape.values)
    return (projected + output) / layout.tensor + 4 * shape.rotated


def _mlp(shape: Shape, layout: ParallelLayout, recompute: Recompute, *, routed: bool) -> float:
    """Return the numbers per token that an MLP keeps besides its input: gate, up and their product; of routed experts
    the input that is copied for each, and the product also before it is scaled; of shared experts (Megatron's own MLP)
    also the activated gate and what it multiplies."""
    t, rows = layout.tensor, layout.tensor if layout.sequence else 1
    if recompute.drops("moe" if routed else "mlp"):
        return 0.0
    if not routed:
        return 3 * shape.inner / t
    copies = shape.chosen * layout.expert_tensor / rows
    of_activation = (2 if recompute.drops("moe_act") else 4) * shape.expert_inner / layout.expert_tensor
    shared = 0 if recompute.drops("shared_experts") else 5 * shape.shared_inner / t
    return copies * (shape.hidden + of_activation) + shared


def logits(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of one chunk of logits. (The gradient of the output layer is added in place.)"""
    rows = min(training.logit_rows, -(-training.tokens // layout.context))
    return rows * -(-shape.vocab // layout.tensor) * LOGITS


def gather_buffer(shape: Shape, layout: ParallelLayout, training: Training) -> int:
    """Return the bytes of the buffer into which Megatron gathers the hidden states of all rows under sequence
    parallelism, and which it keeps."""
    rows = -(-training.tokens // layout.context)
    return rows * shape.hidden * BYTES[training.dtype] if layout.sequence and layout.tensor > 1 else 0
