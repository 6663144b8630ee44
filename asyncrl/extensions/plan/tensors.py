"""The tensors of an HF folder: which of them a rank holds entirely, and their names and shapes, computed from the
folder's config alone, for planning with a model whose files are not available."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from asyncrl.models.architectures import megatron_arguments
from asyncrl.models.families import choosing_biases, family_of, known_families
from asyncrl.models.family import HF, Layout, WeightRow

Tensor = tuple[str, tuple[int, ...]]
"""Name and shape; for a matrix, [output features, input features]."""
BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by dtype."""
WHOLE = (
    "norm.weight",
    "gate.weight",
    "router.weight",
    "router.bias",
    "o_proj.bias",
    "down_proj_bias",
)
"""Name suffixes of tensors that every tensor-parallel rank holds entirely, besides biases that choose experts: norms,
routers, and biases of output features that ranks add up."""


@cache
def tower_prefixes() -> tuple[str, ...]:
    """Return the beginnings of the names of a vision tower's tensors."""
    return tuple(family.tower.prefix for family in known_families().values() if family.tower)


@cache
def _layer(name: str) -> int | None:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


class Weight(NamedTuple):
    """A tensor of an HF folder."""

    name: str
    shape: tuple[int, ...]
    replicated: bool = False

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Return the layer number, from 0; None outside of layers."""
        return _layer(self.name)

    @property
    def routed(self) -> bool:
        """Return whether it belongs to a routed expert."""
        return ".experts." in self.name

    @property
    def whole(self) -> bool:
        """Return whether tensor-parallel ranks hold it entirely instead of sharding it."""
        return self.replicated or self.name.endswith((*WHOLE, *choosing_biases()))


def tensors(hf: HF) -> Iterator[Tensor]:
    """Yield all tensors in the order of the model, but those of a vision tower (shapes.py counts it) and of multi-token
    prediction. Raises ConfigError for a family that cannot be trained."""
    arguments, tied = megatron_arguments(hf), hf.get("tie_word_embeddings", False)
    experts, sparse = (
        arguments.get("num_moe_experts", 0),
        arguments.get("moe_layer_freq", [0] * hf["num_hidden_layers"]),
    )
    weights = [one for one in family_of(hf).weights if not (tied and one.layout is Layout.HEAD)]
    around = [one for one in weights if "{layer}" not in one.megatron]
    yield from _of(around.pop(0), hf, 0, 0)
    for layer, has_experts in enumerate(sparse):
        for weight in weights:
            if "{layer}" in weight.megatron and weight.present(arguments, "sparse" if has_experts else "dense"):
                for expert in range(experts if "{expert}" in weight.hf[0] else 1):
                    yield from _of(weight, hf, layer, expert)
    for weight in around:
        yield from _of(weight, hf, 0, 0)


def _of(weight: WeightRow, hf: HF, layer: int, expert: int) -> Iterator[Tensor]:
    for name in weight.hf:
        yield name.format(layer=layer, expert=expert), _shape(name, hf)


def _shape(name: str, hf: HF) -> tuple[int, ...]:
    """Return a tensor's shape by the end of its name."""
    hidden, heads, vocab = hf["hidden_size"], hf["num_attention_heads"], hf["vocab_size"]
    width = hf.get("head_dim") or hidden // heads
    queries, keys, values = heads * width, hf.get("num_key_value_heads", heads) * width, heads * width
    if "kv_lora_rank" in hf:
        queries = heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        values = heads * hf["v_head_dim"]
    low, latent, wide = hf.get("q_lora_rank"), hf.get("kv_lora_rank"), family_of(hf).wide_norms
    inner = hf["intermediate_size"]
    if ".experts." in name:
        inner = hf.get("moe_intermediate_size", inner)
    elif ".shared_" in name:
        inner = hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or hf["num_shared_experts"])
    experts = hf.get("n_routed_experts") or hf.get("num_local_experts") or hf.get("num_experts")
    kind, place = name.split(".")[-1], name.split(".")[-2]
    stacks = {
        "gate_up_proj": (experts, hidden, 2 * inner),
        "gate_up_proj_bias": (experts, 2 * inner),
        "down_proj": (experts, inner, hidden),
        "down_proj_bias": (experts, hidden),
        "sinks": (heads,),
        **dict.fromkeys(choosing_biases(), (experts,)),
    }
    if kind in stacks:
        return stacks[kind]
    sizes = {
        **dict.fromkeys(("embed_tokens", "lm_head"), (vocab, hidden)),
        "q_norm": (queries if wide else width,),
        "k_norm": (keys if wide else width,),
        "q_proj": (queries, hidden),
        **dict.fromkeys(("k_proj", "v_proj"), (keys, hidden)),
        "qkv_proj": (queries + 2 * keys, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "q_a_proj": (low, hidden),
        "q_a_layernorm": (low,),
        "q_b_proj": (queries, low),
        "kv_a_layernorm": (latent,),
        "o_proj": (hidden, values),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden)),
        **dict.fromkeys(("down_proj", "w2"), (hidden, inner)),
        **dict.fromkeys(("gate", "router"), (experts, hidden)),
    }
    if latent:
        sizes["kv_a_proj_with_mqa"] = (latent + hf["qk_rope_head_dim"], hidden)
        sizes["kv_b_proj"] = (heads * hf["qk_nope_head_dim"] + values, latent)
    found = sizes.get(place, (hidden,))
    return found[:1] if kind == "bias" else found
