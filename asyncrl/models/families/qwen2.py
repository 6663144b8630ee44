"""Qwen2 and Qwen2.5: a Llama with biases of queries, keys and values."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA, QKV_BIAS

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    weights=(*LLAMA, *QKV_BIAS),
    arguments=lambda hf: {"add_qkv_bias": True},
    serving=Serving(adapters=True),
)
