"""Qwen3-VL, dense: Qwen3 with a vision tower."""

from asyncrl.extensions.vision.towers import tower
from asyncrl.models.families import qwen3
from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import inside

TINY = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    },
}
TINY_TOWER = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}

FAMILY = Family(
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    weights=inside(qwen3.FAMILY.weights, "language_model"),
    arguments=qwen3.FAMILY.arguments,
    tower=tower("Qwen3VLVisionModel", "model.visual.", tiny=TINY_TOWER),
    serving=Serving(adapters=True),
    tiny=TINY,
)
