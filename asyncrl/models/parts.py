"""Parts that families have in common: tables of weights, and arguments of Megatron's TransformerConfig.

The names in engines are those of SGLang 0.5.21: `load_weights` of sglang/srt/models/*.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from asyncrl.models.family import HF, Arguments, Layout, WeightRow

Weights = tuple[WeightRow, ...]
SAME = "the name of its HF tensor"

# --- weights ------------------------------------------------------------------------------------------------


def layer(megatron: str, layout: Layout, *hf: str, engine: str = SAME, **more: Any) -> WeightRow:
    """Return a weight of each layer, or of each of one kind; `more` are further fields of its row."""
    at = "model.layers.{layer}."
    place = at + (hf[0] if engine == SAME else engine)
    return WeightRow(f"decoder.layers.{{layer}}.{megatron}", layout, tuple(at + name for name in hf), place, **more)


def qkv(kind: str, needs: str = "") -> WeightRow:
    """Return the weight or the bias of the projections to queries, keys and values."""
    names = (f"self_attn.{one}_proj.{kind}" for one in "qkv")
    megatron = f"self_attention.linear_qkv.{kind}"
    return layer(megatron, Layout.QKV, *names, engine=f"self_attn.qkv_proj.{kind}", needs=needs)


def gated(megatron: str, hf: str, needs: str = "", layers: str = "") -> Weights:
    """Return the weights of a gated MLP."""
    gate_up = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    engine = f"{hf}.gate_up_proj.weight"
    down = f"{hf}.down_proj.weight"
    return (
        layer(f"{megatron}.linear_fc1.weight", Layout.GATE_UP, *gate_up, engine=engine, needs=needs, layers=layers),
        layer(f"{megatron}.linear_fc2.weight", Layout.DOWN, down, needs=needs, layers=layers),
    )


def routed(hf: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Weights:
    """Return the weights of routed experts, which engines stack."""
    megatron = "mlp.experts.local_experts.{expert}.linear"
    expert = f"{hf}.experts.{{expert}}"
    gate_up = (f"{expert}.{gate}.weight", f"{expert}.{up}.weight")
    last = f"{expert}.{down}.weight"
    return (
        layer(f"{megatron}_fc1.weight", Layout.GATE_UP, *gate_up, engine=f"{hf}.experts.w13_weight", layers="sparse"),
        layer(f"{megatron}_fc2.weight", Layout.DOWN, last, engine=f"{hf}.experts.w2_weight", layers="sparse"),
    )


def stacked(gate_up: Layout) -> Weights:
    """Return the weights of routed experts that HF stacks, too: with gate and up in one, and transposed."""
    megatron, hf = "mlp.experts.local_experts.{expert}", "mlp.experts"
    fc1, fc2 = f"{megatron}.linear_fc1.weight", f"{megatron}.linear_fc2.weight"
    return (
        layer(fc1, gate_up, f"{hf}.gate_up_proj", engine=f"{hf}.w13_weight", layers="sparse"),
        layer(fc2, Layout.STACKED_DOWN, f"{hf}.down_proj", engine=f"{hf}.w2_weight", layers="sparse"),
    )


def changed(weights: Weights, **fields: Any) -> Weights:
    """Return the weights with other values of some fields: engine=None are not in engines, exact=True in float32."""
    return tuple(replace(weight, **fields) for weight in weights)


def inside(weights: Weights, model: str) -> Weights:
    """Return the weights of a text model that is the part `model` of another."""
    names = (tuple(re.sub(r"^model\.", f"model.{model}.", name) for name in one.hf) for one in weights)
    return tuple(replace(one, hf=hf) for one, hf in zip(weights, names, strict=True))


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EDGES: Weights = (  # what is in no layer
    WeightRow("embedding.word_embeddings.weight", Layout.EMBEDDING, (EMBEDDING,), EMBEDDING),
    WeightRow("decoder.final_layernorm.weight", Layout.WHOLE, ("model.norm.weight",), "model.norm.weight"),
    WeightRow("output_layer.weight", Layout.HEAD, (HEAD,), HEAD),
)
BODY: Weights = (
    EDGES[0],
    layer("input_layernorm.weight", Layout.WHOLE, "input_layernorm.weight"),
    layer("pre_mlp_layernorm.weight", Layout.WHOLE, "post_attention_layernorm.weight"),
    *EDGES[1:],
)
NORMS_AFTER: Weights = (
    layer("self_attention.linear_proj.post_layernorm.weight", Layout.WHOLE, "post_attention_layernorm.weight"),
    layer("mlp.linear_fc2.post_layernorm.weight", Layout.WHOLE, "post_feedforward_layernorm.weight"),
)
OUT_PROJECTION: Weights = (layer("self_attention.linear_proj.weight", Layout.OUT, "self_attn.o_proj.weight"),)
ATTENTION: Weights = (qkv("weight"), *OUT_PROJECTION)
QKV_BIAS: Weights = (qkv("bias", needs="add_qkv_bias"),)
QK_NORM: Weights = tuple(
    layer(f"self_attention.{one}_layernorm.weight", Layout.WHOLE, f"self_attn.{one}_norm.weight", needs="qk_layernorm")
    for one in "qk"
)
_LATENT = "self_attention.linear"
_LOW_RANK = "q_lora_rank"
_DOWN = "self_attn.fused_qkv_a_proj_with_mqa.weight"
LATENT_ATTENTION: Weights = (  # DeepSeek's; the query projection is low-rank in some models
    layer(f"{_LATENT}_q_proj.weight", Layout.QUERY, "self_attn.q_proj.weight", needs=f"not {_LOW_RANK}"),
    layer(f"{_LATENT}_q_down_proj.weight", Layout.COLUMN, "self_attn.q_a_proj.weight", engine=_DOWN, needs=_LOW_RANK),
    layer("self_attention.q_layernorm.weight", Layout.WHOLE, "self_attn.q_a_layernorm.weight", needs=_LOW_RANK),
    layer(f"{_LATENT}_q_up_proj.weight", Layout.QUERY, "self_attn.q_b_proj.weight", needs=_LOW_RANK),
    layer(f"{_LATENT}_kv_down_proj.weight", Layout.COLUMN, "self_attn.kv_a_proj_with_mqa.weight", engine=_DOWN),
    layer("self_attention.kv_layernorm.weight", Layout.WHOLE, "self_attn.kv_a_layernorm.weight"),
    layer(f"{_LATENT}_kv_up_proj.weight", Layout.QUERY, "self_attn.kv_b_proj.weight"),
    *OUT_PROJECTION,
)
MLP: Weights = gated("mlp", "mlp", layers="dense")
ROUTER: Weights = (layer("mlp.router.weight", Layout.WHOLE, "mlp.gate.weight", layers="sparse"),)
ROUTER_BIAS: Weights = (
    layer("mlp.router.expert_bias", Layout.WHOLE, "mlp.gate.e_score_correction_bias", layers="sparse", exact=True),
)
EXPERTS: Weights = routed("mlp")
SHARED = "moe_shared_expert_intermediate_size"
SHARED_EXPERTS: Weights = gated("mlp.shared_experts", "mlp.shared_experts", needs=SHARED, layers="sparse")
MTP: Weights = changed(  # layers after the last one, whose other weights are those of an ordinary layer
    (
        layer("enorm.weight", Layout.WHOLE, "enorm.weight"),
        layer("hnorm.weight", Layout.WHOLE, "hnorm.weight"),
        layer("eh_proj.weight", Layout.COLUMN, "eh_proj.weight"),
        layer("final_layernorm.weight", Layout.WHOLE, "shared_head.norm.weight"),
    ),
    layers="drafts",
    engine=None,
)
LLAMA: Weights = (*BODY, *ATTENTION, *MLP)
DEEPSEEK_V3: Weights = (*BODY, *LATENT_ATTENTION, *MLP, *ROUTER, *ROUTER_BIAS, *EXPERTS, *SHARED_EXPERTS, *MTP)

# --- arguments ----------------------------------------------------------------------------------------------


def experts(hf: HF, *, count: int, inner: int, dense: Collection[int]) -> Arguments:
    """Return the arguments of routed experts with inner size `inner` in all layers but `dense`. No auxiliary loss
    balances them: it would not be part of the policy's objective."""
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_layer_freq": [int(layer not in dense) for layer in range(hf["num_hidden_layers"])],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def count_of_experts(hf: HF) -> int:
    """Return the number of routed experts: transformers 5 writes num_local_experts, and publishers used either name."""
    return int(hf.get("num_local_experts") or hf["num_experts"])


def softmax_router(*, normalized: bool) -> Arguments:
    """Return the arguments of a softmax router. The weights of the chosen experts come from the softmax over all
    experts, or are normalized (which equals the softmax over the chosen ones)."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def deepseek_experts(hf: HF) -> Arguments:
    """Return the arguments of DeepSeek-V3's routed and shared experts, after some dense layers, and of their router: a
    bias that only affects the choice, groups of experts of which each token can use some, and a scaled sum.

    arXiv 2412.19437, section 2.1.2. The bias is loaded and kept constant: it follows the load only in pre-training.
    """
    inner, grouped = hf["moe_intermediate_size"], hf.get("n_group", 1) > 1
    return {
        **experts(hf, count=hf["n_routed_experts"], inner=inner, dense=range(hf["first_k_dense_replace"])),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": hf["n_group"] if grouped else None,
        "moe_router_group_topk": hf["topk_group"] if grouped else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": inner * (hf["n_shared_experts"] or 0) or None,
    }


def latent_attention(hf: HF) -> Arguments:
    """Return the arguments of DeepSeek's multi-head latent attention. Megatron calls the parts of a head without and
    with rotation qk_head and qk_pos_emb_head. For yarn it takes only the softmax factor from these arguments;
    PositionRope computes the frequencies."""
    scaling = rotary(hf)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": scaling["rope_theta"],
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def windows(hf: HF) -> Arguments:
    """Return the arguments of layers that see only the last `sliding_window` positions."""
    return {
        "window_size": (hf["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in hf["layer_types"]],
    }


def rotary(hf: HF) -> dict[str, Any]:
    """Return the rotary embedding's rope_theta, rope_type, partial_rotary_factor and scaling parameters.

    transformers 5 writes rope_parameters, for each kind of layers if they differ: these are those of layers without
    windows. Earlier versions wrote separate fields and rope_scaling, with its kind as `type`. The kind mrope scales
    nothing: models that see have the default frequencies.
    """
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    given = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    found = {name: hf.get(name, value) for name, value in defaults.items()} | given.get("full_attention", given)
    kind = found.get("rope_type", found.get("type", "default"))
    return {**found, "rope_type": "default" if kind == "mrope" else kind}


# --- tiny models --------------------------------------------------------------------------------------------

TINY_DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
TINY_DEEPSEEK = {
    **TINY_DEEPSEEK_EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": 8,  # in transformers, the rotated part
}
