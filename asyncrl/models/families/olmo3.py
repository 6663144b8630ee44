"""OLMo-3: norms after attention and MLP, those of queries and keys over all heads, and windows in three layers of four.

Layers with windows do not scale positions, as in SGLang and arXiv 2512.13961. transformers 5.12.1 scales those of all
layers (its pull request 45945).
"""

from asyncrl.models import parts
from asyncrl.models.family import HF, Family, Serving


def _local_theta(hf: HF) -> float | None:
    found = parts.rotary(hf)
    return None if found["rope_type"] == "default" else float(found["rope_theta"])


FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    weights=(*parts.EDGES, *parts.ATTENTION, *parts.MLP, *parts.QK_NORM, *parts.NORMS_AFTER),
    arguments=lambda hf: {"qk_layernorm": True, **parts.windows(hf)},
    allows=("sliding_window", "attention_factor"),
    local_theta=_local_theta,
    norms_after=True,
    wide_norms=True,
    serving=Serving(stages=False),
    tiny={"sliding_window": 5},
)
