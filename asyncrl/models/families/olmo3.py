"""OLMo-3: norms after attention and MLP, those of queries and keys over all heads, and windows in three layers of four.

Layers with windows do not scale positions, as in SGLang and arXiv 2512.13961. transformers 5.12.1 scales those of all
layers (its pull request 45945).
"""

from collections.abc import Iterator

from asyncrl.models import parts
from asyncrl.models.family import HF, Family, Serving


def _local_theta(hf: HF) -> float | None:
    found = parts.rotary(hf)
    return None if found["rope_type"] == "default" else float(found["rope_theta"])


def _not_served(hf: HF) -> Iterator[tuple[str, str]]:
    """SGLang's own class of the configuration fails in the checks of transformers 5."""
    if (hf.get("rope_parameters") or {}).get("rope_type") == "yarn":
        yield (
            "yarn in rope_parameters",
            "SGLang reads rope_theta and rope_scaling alone: copy the publisher's config.json.",
        )


FAMILY = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    weights=(*parts.EDGES, *parts.ATTENTION, *parts.MLP, *parts.QK_NORM, *parts.NORMS_AFTER),
    arguments=lambda hf: {"qk_layernorm": True, **parts.windows(hf)},
    allows=("sliding_window", "attention_factor"),
    local_theta=_local_theta,
    wide_norms=True,
    serving=Serving(stages=False, unsupported=_not_served),
    tiny={"sliding_window": 5},
)
