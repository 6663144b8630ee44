"""Seed-OSS: a Llama with biases of queries, keys and values."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA, QKV_BIAS

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    weights=(*LLAMA, *QKV_BIAS),
    arguments=lambda hf: {"add_qkv_bias": hf.get("attention_bias", True)},
    allows=("attention_bias",),
    serving=Serving(fuses=False, stages=False),
    tiny={"attention_bias": True, "attention_out_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0},
    variants=({"attention_bias": False},),
)
