"""OLMo-2: the layers of OLMo-3 without windows."""

from asyncrl.models.families import olmo3
from asyncrl.models.family import Family, Serving

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    weights=olmo3.FAMILY.weights,
    arguments=lambda hf: {"qk_layernorm": True},
    wide_norms=True,
    serving=Serving(stages=False),
)
