"""Llama 2 and 3, and the many models of this class."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    weights=LLAMA,
    serving=Serving(adapters=True, head_everywhere=True, tied_stages=False),
)
