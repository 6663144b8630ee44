"""GLM-4.5, 4.6 and 4.7: DeepSeek's experts with grouped-query attention."""

from asyncrl.models import parts
from asyncrl.models.family import Family, Serving

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    weights=(
        *parts.LLAMA,
        *parts.QK_NORM,
        *parts.changed(parts.ROUTER, exact=True),
        *parts.EXPERTS,
        *parts.QKV_BIAS,
        *parts.ROUTER_BIAS,
        *parts.SHARED_EXPERTS,
        *parts.MTP,
    ),
    arguments=lambda hf: {
        "qk_layernorm": hf.get("use_qk_norm", False),
        "add_qkv_bias": hf.get("attention_bias", False),
        **parts.deepseek_experts(hf),
    },
    allows=("attention_bias",),
    defaults={"partial_rotary_factor": 0.5},
    serving=Serving(replicates=True, head_everywhere=True, fuses_shared_expert=lambda hf: True),
    tiny={**parts.TINY_DEEPSEEK_EXPERTS, "attention_bias": True, "use_qk_norm": True},
    variants=({"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 1},),
)
