"""Qwen3, dense: a Llama with norms of queries and keys."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA, QK_NORM

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    weights=(*LLAMA, *QK_NORM),
    arguments=lambda hf: {"qk_layernorm": True},
    serving=Serving(adapters=True, replicates=True),
)
