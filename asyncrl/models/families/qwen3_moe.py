"""Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3 with routed experts."""

from collections.abc import Iterator

from asyncrl.models import parts
from asyncrl.models.family import HF, Arguments, Family, Serving


def _arguments(hf: HF) -> Arguments:
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    dense = [layer for layer in range(hf["num_hidden_layers"]) if layer in listed or (layer + 1) % step]
    return {
        "qk_layernorm": True,
        **parts.experts(hf, count=parts.count_of_experts(hf), inner=hf["moe_intermediate_size"], dense=dense),
        **parts.softmax_router(normalized=hf.get("norm_topk_prob", False)),
    }


def _not_served(hf: HF) -> Iterator[tuple[str, str]]:
    """SGLang's qwen3_moe.py builds experts in every layer and silently drops the weights of dense ones."""
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        yield "Qwen3-MoE with dense layers", "SGLang does not support its dense layers: use another model."


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    weights=(
        *parts.BODY,
        *parts.ATTENTION,
        *parts.changed(parts.MLP, engine=None),
        *parts.QK_NORM,
        *parts.ROUTER,
        *parts.EXPERTS,
    ),
    arguments=_arguments,
    serving=Serving(replicates=True, head_everywhere=True, unsupported=_not_served),
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    variants=({"mlp_only_layers": [1]}, {"norm_topk_prob": False}),
)
