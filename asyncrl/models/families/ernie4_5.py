"""ERNIE-4.5, dense: a Llama that rotates pairs of neighbours."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA

FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    weights=LLAMA,
    arguments=lambda hf: {"rotary_interleaved": True},
    serving=Serving(fuses=False, stages=False),
)
