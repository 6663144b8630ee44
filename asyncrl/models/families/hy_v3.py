"""Hunyuan 3 (Hy3): DeepSeek's experts with Qwen3's attention, under names of its own."""

from collections.abc import Iterator
from typing import Any

from asyncrl.models import parts
from asyncrl.models.family import HF, Arguments, Family, Layout, Serving
from asyncrl.models.parts import layer


def _dense(hf: HF) -> int:
    """Return the number of dense layers: transformers writes the kind of each layer."""
    kinds = hf.get("mlp_layer_types")
    return kinds.count("dense") if kinds else int(hf["first_k_dense_replace"])


def _arguments(hf: HF) -> Arguments:
    fields = {
        "n_routed_experts": parts.count_of_experts(hf),
        "n_shared_experts": hf["num_shared_experts"],
        "first_k_dense_replace": _dense(hf),
        "routed_scaling_factor": hf["router_scaling_factor"],
    }
    return {"qk_layernorm": True, **parts.deepseek_experts({**hf, **fields})}


def _unsupported(hf: HF) -> Iterator[tuple[str, str]]:
    if "dense" in (hf.get("mlp_layer_types") or [])[_dense(hf) :]:
        yield "mlp_layer_types", "Dense layers are supported before those with experts only."
    if not hf.get("route_norm", True):
        yield "route_norm=false", "Sigmoid routers are supported with normalized shares only."


def _not_served(hf: HF) -> Iterator[tuple[str, str]]:
    if (kind := parts.rotary(hf)["rope_type"]) != "default":
        yield f"rope_type={kind}", "SGLang ignores how this model scales its positions: use another model."


ROUTER: dict[str, Any] = {"layers": "sparse", "exact": True}

FAMILY = Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    weights=(
        *parts.LLAMA,
        *parts.QK_NORM,
        layer("mlp.router.weight", Layout.WHOLE, "mlp.router.gate.weight", engine="mlp.gate.weight", **ROUTER),
        *parts.EXPERTS,
        layer("mlp.router.expert_bias", Layout.WHOLE, "mlp.expert_bias", **ROUTER),
        *parts.gated("mlp.shared_experts", "mlp.shared_mlp", parts.SHARED, "sparse"),
        *parts.MTP,
    ),
    arguments=_arguments,
    unsupported=_unsupported,
    serving=Serving(head_everywhere=True, stages=False, reports_experts=False, unsupported=_not_served),
    tiny={
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "router_scaling_factor": 1.5,
        # fields of the publisher, which SGLang reads
        "first_k_dense_replace": 1,
        "qk_norm": True,
        "route_norm": True,
    },
)
