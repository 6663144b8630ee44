"""SmolLM3: a Llama without rotation in every fourth layer."""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA

FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    weights=LLAMA,
    arguments=lambda hf: {"no_rope_freq": [1 - rotates for rotates in hf["no_rope_layers"]]},
    serving=Serving(fuses=False, stages=False),
    tiny={"no_rope_layer_interval": 2},
)
