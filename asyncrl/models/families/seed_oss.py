"""Seed-OSS: a Llama with biases of queries, keys and values."""

from collections.abc import Iterator

from asyncrl.models.family import HF, Family, Serving
from asyncrl.models.parts import LLAMA, QKV_BIAS


def _unsupported(hf: HF) -> Iterator[tuple[str, str]]:
    if hf.get("attention_out_bias"):
        yield "attention_out_bias=true", "Biases are supported on queries, keys and values alone."


FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    weights=(*LLAMA, *QKV_BIAS),
    arguments=lambda hf: {"add_qkv_bias": hf.get("attention_bias", True)},
    unsupported=_unsupported,
    allows=("attention_bias",),
    serving=Serving(fuses=False, stages=False),
    tiny={"attention_bias": True, "attention_out_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0},
    variants=({"attention_bias": False},),
)
