"""Shapes of a model and of a layout, and the number of parameters that each rank holds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.extensions.plan.tensors import Tensor, Weight, tower_prefixes
from asyncrl.models.architectures import megatron_arguments
from asyncrl.models.families import choosing_biases, family_of
from asyncrl.models.family import Arguments
from asyncrl.models.parts import rotary
from asyncrl.parallel import PipelineSplit

FLOAT = 4


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
    latent: int = 0  # width of the normalized vectors of latent attention, queries' and keys'; 0: plain attention
    normed: bool = False  # whether queries and keys are normalized
    wide: bool = False  # whether that norm takes all heads as one vector, which no kernel fuses
    norm_before: bool = True  # whether attention and MLP have a norm before them
    norm_after: bool = False  # whether they have one after them
    sparse: int = 0  # number of layers with routed experts
    experts: int = 0  # routed experts of a layer
    chosen: int = 0  # experts per token
    expert_inner: int = 0
    shared_inner: int = 0  # total width of the shared experts
    activating: int = 0  # numbers per inner feature that an activation keeps besides gate and up
    cached: int = 0  # KV cache numbers per token and layer
    cache_heads: int = 1  # KV heads, sharded over tensor-parallel ranks and replicated if there are more ranks
    tower: int = 0  # parameters of the vision tower, which ranks of the first stage hold entirely

    def key_shards(self, layout: ParallelLayout) -> int:
        """Return the number of parts of the keys, of which each tensor-parallel rank holds one."""
        return layout.tensor if self.latent else min(layout.tensor, self.cache_heads)


def shape_of(hf: dict[str, Any]) -> Shape:
    """Return the shape of a model of a family that the trainer knows; `hf` is config.json. Raises ConfigError or
    KeyError for other families."""
    record = family_of(hf)
    family = megatron_arguments(hf)
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    width = hf.get("head_dim") or hidden // heads
    queries, values = heads * width, hf.get("num_key_value_heads", heads) * width
    keys, cached, parts = values, 2 * values, values // width
    rotated, latent = round(width * rotary(hf)["partial_rotary_factor"]), 0
    if family.get("multi_latent_attention"):
        queries = keys = heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        values = heads * hf["v_head_dim"]
        rotated = hf["qk_rope_head_dim"]
        cached, parts = hf["kv_lora_rank"] + rotated, 1
        latent = hf["kv_lora_rank"] + (hf.get("q_lora_rank") or 0)
    return Shape(
        layers=hf["num_hidden_layers"],
        hidden=hidden,
        queries=queries,
        keys=keys,
        values=values,
        inner=hf["intermediate_size"],
        vocab=hf["vocab_size"],
        tied=bool(hf.get("tie_word_embeddings", False)),
        rotated=rotated,
        latent=latent,
        normed=bool(family.get("qk_layernorm")),
        wide=record.wide_norms,
        norm_before=record.has(".input_layernorm.weight"),
        norm_after=record.has(".post_layernorm.weight"),
        sparse=sum(family.get("moe_layer_freq", [])),
        experts=family.get("num_moe_experts") or 0,
        chosen=family.get("moe_router_topk", 0),
        expert_inner=family.get("moe_ffn_hidden_size", 0),
        shared_inner=family.get("moe_shared_expert_intermediate_size") or 0,
        activating=_activating(family),
        cached=cached,
        cache_heads=parts,
        tower=tower_parameters(hf),
    )


def _activating(arguments: Arguments) -> int:
    """Return how many numbers per inner feature autograd keeps of what trainer/mlp.py computes between gate and up, and
    their product. SiLU alone keeps none."""
    activation, limited = arguments.get("activation_func", "silu"), "activation_func_clamp_value" in arguments
    if activation == "silu" and not limited:
        return 0
    sigmoid = int(activation == "quick_gelu")
    return 1 + sigmoid + 2 * limited  # the activated gate; gate and up within their limits


class RankParameters(NamedTuple):
    """Number of parameters on one rank."""

    dense: int
    routed: int

    @property
    def all(self) -> int:
        """Return the total."""
        return self.dense + self.routed


def counted(tensors: Iterable[Tensor | Weight], shape: Shape) -> list[Weight]:
    """Return the weights of the text model that trainer and engine load. This excludes the vision tower, further layers
    (multi-token prediction), buffers of old checkpoints, an output layer that is the embedding, and the router's
    load-balancing bias, which is not a parameter."""
    return [
        one
        for one in (Weight(*tensor) for tensor in tensors)
        if (one.layer is None or one.layer < shape.layers)
        and not one.name.endswith(("rotary_emb.inv_freq", *choosing_biases()))
        and not (shape.tied and one.name == "lm_head.weight")
        and not one.name.startswith(tower_prefixes())
    ]


def of_critic(weights: Sequence[Weight], shape: Shape) -> list[Weight]:
    """Return the weights of a critic, in which a value head takes the place of the output layer."""
    head = [Weight("value_head.weight", (1, shape.hidden)), Weight("value_head.bias", (1,))]
    return [*(one for one in weights if one.name != "lm_head.weight"), *head]


def held(weights: Sequence[Weight], shape: Shape, layout: ParallelLayout, stage: int) -> RankParameters:
    """Return the number of parameters on the first rank of a pipeline stage, which holds at least as many as the
    others. `weights` is a result of `counted`."""
    dense = routed = 0
    for one in of_stage(weights, shape, layout, stage):
        if one.routed:
            routed += one.elements // layout.expert // (1 if one.replicated else layout.expert_tensor)
        elif one.whole or one.name.endswith(layout.whole):
            dense += one.elements
        else:
            rows = -(-one.shape[0] // layout.tensor)  # the vocabulary is padded; everything else divides evenly
            dense += rows * math.prod(one.shape[1:])
    return RankParameters(dense, routed)


def of_stage(weights: Iterable[Weight], shape: Shape, layout: ParallelLayout, stage: int) -> Iterator[Weight]:
    """Yield the tensors that a pipeline stage holds. A tied embedding is on two stages, of which the first publishes
    it."""
    layers = {layer for chunk in layout.layers_of(shape.layers)[stage] for layer in chunk}
    first, last = stage == 0, stage == layout.pipeline - 1
    for one in weights:
        if one.layer is not None:
            here = one.layer in layers
        elif one.name.startswith(tower_prefixes()):
            here = first
        elif "embed_tokens" in one.name:
            here = first or (last and shape.tied)
        else:
            here = last
        if here:
            yield one


def parameters(weights: Iterable[Weight]) -> RankParameters:
    """Return the number of parameters of the whole model."""
    found = list(weights)
    routed = sum(one.elements for one in found if one.routed)
    return RankParameters(sum(one.elements for one in found) - routed, routed)


def active(weights: Sequence[Weight], shape: Shape, *, embedding: bool = True) -> float:
    """Return the number of parameters that each token is multiplied with: without the embedding, which adapters have
    not, and only the routed experts that it selects."""
    held = parameters(weights)
    if embedding and not shape.tied:
        held = held._replace(dense=held.dense - shape.vocab * shape.hidden)
    return held.dense + held.routed * shape.chosen / max(1, shape.experts)


def tower_parameters(hf: dict[str, Any]) -> int:
    """Return the number of parameters of the vision tower; 0 for a text model."""
    tower = family_of(hf).tower
    return tower.parameters(hf) if tower else 0
