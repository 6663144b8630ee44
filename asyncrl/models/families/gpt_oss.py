"""gpt-oss 20B and 120B: windows in every second layer, sinks, biases everywhere, and stacked experts with limits.

SGLang's engines keep the sinks in bfloat16 on GPUs.
"""

from collections.abc import Iterator

from asyncrl.models import parts
from asyncrl.models.family import HF, Arguments, Family, Layout, Serving
from asyncrl.models.parts import layer

LIMIT = 7.0
"""Of gate and up; config.json names it for engines alone."""
EXPERT = "mlp.experts.local_experts.{expert}"


def _arguments(hf: HF) -> Arguments:
    return {
        **parts.windows(hf),
        **parts.experts(hf, count=parts.count_of_experts(hf), inner=hf["intermediate_size"], dense=()),
        **parts.softmax_router(normalized=True),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": LIMIT,
        "glu_linear_offset": 1.0,
    }


def _unsupported(hf: HF) -> Iterator[tuple[str, str]]:
    if hf.get("swiglu_limit", LIMIT) != LIMIT:
        yield f"swiglu_limit={hf['swiglu_limit']}", f"Supported: {LIMIT}, which transformers has always."
    if not hf.get("attention_bias", True):
        yield "attention_bias=false", "gpt-oss is supported with biases of its attention alone."


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    weights=(
        *parts.BODY,
        *parts.ATTENTION,
        *parts.QKV_BIAS,
        layer("self_attention.linear_proj.bias", Layout.WHOLE, "self_attn.o_proj.bias"),
        layer("self_attention.core_attention.softmax_offset", Layout.QUERY, "self_attn.sinks"),
        layer("mlp.router.weight", Layout.WHOLE, "mlp.router.weight"),
        layer("mlp.router.bias", Layout.WHOLE, "mlp.router.bias"),
        *parts.stacked(Layout.INTERLEAVED_GATE_UP),
        layer(
            f"{EXPERT}.linear_fc1.bias",
            Layout.INTERLEAVED_GATE_UP,
            "mlp.experts.gate_up_proj_bias",
            engine="mlp.experts.w13_weight_bias",
            exact=True,
        ),
        layer(
            f"{EXPERT}.linear_fc2.bias",
            Layout.WHOLE,
            "mlp.experts.down_proj_bias",
            engine="mlp.experts.w2_weight_bias",
            exact=True,
        ),
    ),
    arguments=_arguments,
    unsupported=_unsupported,
    allows=("attention_bias", "sliding_window", "attention_factor"),
    serving=Serving(stages=False, reports_experts=False),
    tiny={
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "swiglu_limit": LIMIT,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
)
