"""GLM-4.7-Flash: DeepSeek-V3's layers.

transformers gives the two latent norms 1e-6, whatever rms_norm_eps says; SGLang and the trainer give them
rms_norm_eps. With the published 1e-5, logits differ from transformers' by 7e-5, and not from the engine's.
"""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import DEEPSEEK_V3, ROUTER, TINY_DEEPSEEK, changed, deepseek_experts, latent_attention

FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    weights=tuple(changed((one,), exact=True)[0] if one in ROUTER else one for one in DEEPSEEK_V3),
    arguments=lambda hf: {**latent_attention(hf), **deepseek_experts(hf)},
    serving=Serving(on_cpu=False, head_everywhere=True, fuses_shared_expert=lambda hf: True),
    tiny={**TINY_DEEPSEEK, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
    variants=({"q_lora_rank": None, "n_shared_experts": 1},),
)
