"""DeepSeek-V3, V3.1 and R1, and Kimi-K2, whose config.json has the same class under another model type.

As published, Kimi-K2 cannot start: its tokenizer is code of its publisher, which is not run. A folder of it needs a
tokenizer.json.
"""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import DEEPSEEK_V3, TINY_DEEPSEEK, deepseek_experts, latent_attention

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    weights=DEEPSEEK_V3,
    arguments=lambda hf: {**latent_attention(hf), **deepseek_experts(hf)},
    serving=Serving(on_cpu=False, replicates=True, fuses_shared_expert=lambda hf: hf["n_routed_experts"] == 256),
    tiny=TINY_DEEPSEEK,
    variants=({"q_lora_rank": None, "n_group": 1, "topk_group": 1},),
)
