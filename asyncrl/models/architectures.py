"""The model families that the trainer can build: an HF config as Megatron arguments, without importing torch.

A family is one entry of ARCHITECTURES, composed of the parts below, plus its names (weights/names.py) and its layout in
the engines (weights/engine_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.models.vision import REFUSED
from asyncrl.routing import RoutingShape

HF = dict[str, Any]
"""A model folder's config.json."""
Arguments = dict[str, Any]
"""Arguments of Megatron's TransformerConfig."""


# --- parts --------------------------------------------------------------------------------------------------


def _experts(hf: HF, *, count: int, inner: int, dense: Collection[int]) -> Arguments:
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


def _softmax_router(*, normalized: bool) -> Arguments:
    """Return the arguments of a softmax router. The weights of the chosen experts come from the softmax over all
    experts, or are normalized (which equals the softmax over the chosen ones)."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def _sigmoid_router(hf: HF) -> Arguments:
    """Return the arguments of DeepSeek-V3's router: a bias that only affects the choice, groups of experts of which
    each token can use some, and a scaled sum.

    arXiv 2412.19437, section 2.1.2. The bias is loaded and kept constant: it follows the load only in pre-training.
    """
    grouped = hf.get("n_group", 1) > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": hf["n_group"] if grouped else None,
        "moe_router_group_topk": hf["topk_group"] if grouped else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
    }


def _deepseek_experts(hf: HF) -> Arguments:
    """Return the arguments of routed and shared experts, after some dense layers."""
    inner, shared = hf["moe_intermediate_size"], hf["n_shared_experts"]
    return {
        **_experts(hf, count=hf["n_routed_experts"], inner=inner, dense=range(hf["first_k_dense_replace"])),
        **_sigmoid_router(hf),
        "moe_shared_expert_intermediate_size": inner * shared if shared else None,
    }


def _qwen_dense_layers(hf: HF) -> list[int]:
    """Return the layers of Qwen's mixture-of-experts models that have an ordinary MLP."""
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return [layer for layer in range(hf["num_hidden_layers"]) if layer in listed or (layer + 1) % step]


def _latent_attention(hf: HF) -> Arguments:
    """Return the arguments of DeepSeek's multi-head latent attention. Megatron calls the parts of a head without and
    with rotation qk_head and qk_pos_emb_head. For yarn it takes only the softmax factor from these arguments;
    PositionRope computes the frequencies."""
    scaling = rope(hf)
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


# --- families -----------------------------------------------------------------------------------------------

ARCHITECTURES: dict[str, Callable[[HF], Arguments]] = {
    "LlamaForCausalLM": lambda hf: {},
    "Qwen2ForCausalLM": lambda hf: {"add_qkv_bias": True},
    "Qwen2_5_VLForConditionalGeneration": lambda hf: {"add_qkv_bias": True},
    "Qwen3ForCausalLM": lambda hf: {"qk_layernorm": True},
    "Qwen3VLForConditionalGeneration": lambda hf: {"qk_layernorm": True},
    "Qwen3MoeForCausalLM": lambda hf: {
        "qk_layernorm": True,
        **_experts(hf, count=_count(hf), inner=hf["moe_intermediate_size"], dense=_qwen_dense_layers(hf)),
        **_softmax_router(normalized=hf.get("norm_topk_prob", False)),
    },
    "MixtralForCausalLM": lambda hf: {
        **_experts(hf, count=_count(hf), inner=hf["intermediate_size"], dense=()),
        **_softmax_router(normalized=True),
    },
    "Glm4MoeForCausalLM": lambda hf: {
        "qk_layernorm": hf.get("use_qk_norm", False),
        "add_qkv_bias": hf.get("attention_bias", False),
        **_deepseek_experts(hf),
    },
    "DeepseekV3ForCausalLM": lambda hf: {**_latent_attention(hf), **_deepseek_experts(hf)},
}


def megatron_arguments(hf: HF) -> Arguments:
    """Return the arguments in which this model's TransformerConfig differs from a plain Llama's. Raises ConfigError if
    a field is missing."""
    try:
        return ARCHITECTURES[hf["architectures"][0]](hf)
    except KeyError as error:
        raise ConfigError(
            "model.path", f"no {error.args[0]}", "config.json lacks this field: copy the file again."
        ) from None


def routing_shape(hf: HF) -> RoutingShape | None:
    """Return the shape of a token's routing, or None for a model without experts."""
    family = megatron_arguments(hf)
    if not family.get("num_moe_experts"):
        return None
    sparse = tuple(layer for layer, has_experts in enumerate(family["moe_layer_freq"]) if has_experts)
    return RoutingShape(hf["num_hidden_layers"], sparse, family["moe_router_topk"], family["num_moe_experts"])


def _count(hf: HF) -> int:
    """Return the number of routed experts: transformers 5 writes num_local_experts, and publishers used either name."""
    return int(hf.get("num_local_experts") or hf["num_experts"])


def rope(hf: HF) -> dict[str, Any]:
    """Return the rotary embedding's rope_theta, rope_type, partial_rotary_factor and scaling parameters.

    transformers 5 writes rope_parameters; earlier versions wrote separate fields and rope_scaling, with its kind as
    `type`. The kind mrope scales nothing: models that see have the default frequencies.
    """
    defaults = {
        "rope_theta": hf.get("rope_theta", 10000.0),
        "partial_rotary_factor": hf.get("partial_rotary_factor", 0.5 if hf.get("model_type") == "glm4_moe" else 1.0),
    }
    found = {**defaults, **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = found.get("rope_type", found.get("type", "default"))
    return {**found, "rope_type": "default" if kind == "mrope" else kind}


def rope_axes(hf: HF) -> list[int] | None:
    """Return which position (0 time, 1 height, 2 width) turns each rotated pair of a head; None for text models, whose
    tokens have one position."""
    section = rope(hf).get("mrope_section")
    if not section or not rope(hf).get("mrope_interleaved"):
        return [axis for axis, pairs in enumerate(section) for _ in range(pairs)] if section else None
    return [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(sum(section))]


# --- limits -------------------------------------------------------------------------------------------------


def check_architecture(hf: HF) -> None:
    """Raise ConfigError for models that trainer/model.py and weights/names.py do not support; `hf` is the folder's
    config.json."""
    name = (hf.get("architectures") or ["none named"])[0]
    if name not in ARCHITECTURES:
        why = f"It is not supported, because {REFUSED[name]}. " if name in REFUSED else ""
        raise ConfigError("model.path", name, f"{why}Supported architectures: {sorted(ARCHITECTURES)}.")
    for found, remedy in _unsupported(name, hf):
        raise ConfigError("model.path", found, remedy)


def _unsupported(name: str, hf: HF) -> Iterator[tuple[str, str]]:
    """Yield (what was found, what is supported) for everything in a config that would change the logits relative to
    HF's."""
    biased = ("mlp_bias",) if name == "Glm4MoeForCausalLM" else ("attention_bias", "mlp_bias")
    for field in biased:
        if hf.get(field):
            yield f"{field}=true", "Models with biases are not supported yet, except on queries, keys and values."
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={hf['hidden_act']}", "Only gated MLPs with silu are supported so far."
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        yield f"sliding_window={hf['sliding_window']}", "Sliding-window attention is not supported yet."
    if hf.get("quantization_config"):
        yield "quantization_config", "Convert the weights to bfloat16 first."
    if not hf.get("rope_interleave", True):
        yield "rope_interleave=false", "Latent attention is supported with interleaved rotary dimensions only."
    yield from _unsupported_rope(rope(hf))
    yield from _unsupported_routing(hf, megatron_arguments(hf))


def _unsupported_rope(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kind = found["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rope_type={kind}", "Supported rotary embeddings: default, linear, llama3, yarn."
    # transformers scales sines and cosines by a factor of mscale and mscale_all_dim, which is 1 in DeepSeek's models.
    mscale = found.get("mscale")
    plain = found.get("attention_factor") == 1.0 or (mscale and mscale == found.get("mscale_all_dim"))
    if kind == "yarn" and not plain:
        yield "rope_type=yarn", "Supported with attention_factor=1.0, or with equal mscale and mscale_all_dim."


def _unsupported_routing(hf: HF, arguments: Arguments) -> Iterator[tuple[str, str]]:
    chosen, function = arguments.get("moe_router_topk"), arguments.get("moe_router_score_function")
    if function == "softmax" and chosen == 1 and not arguments["moe_router_pre_softmax"]:
        yield "num_experts_per_tok=1", "The share of one expert is always 1 when normalized: it cannot be trained."
    if function == "sigmoid":
        if not hf.get("norm_topk_prob", True):
            yield "norm_topk_prob=false", "Sigmoid routers are supported with normalized shares only."
        open_groups = arguments["moe_router_group_topk"]
        if open_groups and hf["num_experts_per_tok"] // open_groups != 2:
            yield (
                f"num_experts_per_tok={chosen}, topk_group={open_groups}",
                "Groups are ranked by their two best experts; Megatron ranks by num_experts_per_tok // topk_group.",
            )
        for field, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if hf.get(field, supported) != supported:
                yield f"{field}={hf[field]}", f"Supported: {supported}."
