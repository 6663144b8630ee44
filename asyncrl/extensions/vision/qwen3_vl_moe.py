"""Qwen3-VL-30B-A3B and 235B-A22B: Qwen3-MoE with a vision tower, whose files stack the experts."""

from asyncrl.extensions.vision import qwen3_vl
from asyncrl.extensions.vision.towers import tower
from asyncrl.models import parts
from asyncrl.models.families import qwen3_moe
from asyncrl.models.family import Family, Layout

WEIGHTS = tuple(one for one in qwen3_moe.FAMILY.weights if one not in parts.EXPERTS)

FAMILY = Family(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    weights=parts.inside((*WEIGHTS, *parts.stacked(Layout.STACKED_GATE_UP)), "language_model"),
    # transformers always normalizes the shares of the chosen experts
    arguments=lambda hf: qwen3_moe.FAMILY.arguments({**hf, "norm_topk_prob": True}),
    tower=tower("Qwen3VLMoeVisionModel", "model.visual.", tiny=qwen3_vl.TINY_TOWER),
    serving=qwen3_moe.FAMILY.serving,
    tiny={**qwen3_vl.TINY, **qwen3_moe.FAMILY.tiny},
    variants=({"mlp_only_layers": [1]},),
)
