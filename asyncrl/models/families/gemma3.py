"""Gemma-3, the text model: norms before and after attention and MLP, whose weights are centered on zero, a scaled
embedding, and windows in five layers of six.

In bfloat16, trainers and transformers round the factor of the embedding, and SGLang does not.
"""

from collections.abc import Iterator

from asyncrl.models import parts
from asyncrl.models.family import HF, Arguments, Family, Layout, Serving
from asyncrl.models.parts import layer

PUBLISHED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
}
"""Fields of config.json that are supported with these values alone."""


def _arguments(hf: HF) -> Arguments:
    every, layers = hf.get("sliding_window_pattern", 6), range(1, hf["num_hidden_layers"] + 1)
    kinds = ["sliding_attention" if number % every else "full_attention" for number in layers]
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": "gelu_tanh",
        "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
        **parts.windows({"layer_types": kinds, **hf}),
    }


def _local(hf: HF) -> HF:
    """Return the rotary embedding of layers with windows."""
    given = (hf.get("rope_parameters") or {}).get("sliding_attention", {})
    return {"rope_type": "default", "rope_theta": hf.get("rope_local_base_freq", 10000.0), **given}


def _unsupported(hf: HF) -> Iterator[tuple[str, str]]:
    for field, supported in PUBLISHED.items():
        if hf.get(field, supported) not in (supported, None):
            yield f"{field}={hf[field]}", f"Supported: {supported}, as Gemma-3 was published."
    if (kind := _local(hf)["rope_type"]) != "default":
        yield f"rope_type={kind} of sliding_attention", "Layers with windows are supported without scaling alone."


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    weights=(
        *parts.changed(parts.EDGES[:1], layout=Layout.WHOLE_EMBEDDING),
        layer("input_layernorm.weight", Layout.WHOLE, "input_layernorm.weight"),
        layer("pre_mlp_layernorm.weight", Layout.WHOLE, "pre_feedforward_layernorm.weight"),
        *parts.EDGES[1:],
        *parts.ATTENTION,
        *parts.MLP,
        *parts.QK_NORM,
        *parts.NORMS_AFTER,
    ),
    arguments=_arguments,
    unsupported=_unsupported,
    allows=("sliding_window",),
    defaults={"tie_word_embeddings": True, "rope_theta": 1e6, "head_dim": 256, "query_pre_attn_scalar": 256},
    embedding_scale=lambda hf: float(hf["hidden_size"] ** 0.5),
    local_theta=lambda hf: float(_local(hf)["rope_theta"]),
    serving=Serving(stages=False),
    tiny={
        "tie_word_embeddings": True,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
)
