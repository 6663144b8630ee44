"""Mistral 7B from v0.2 on, Nemo and Small: a Llama. SGLang ignores the sliding window of v0.1, which is refused."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA

FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    weights=LLAMA,
    serving=Serving(head_everywhere=True, tied_stages=False),
    tiny={"sliding_window": None},
)
