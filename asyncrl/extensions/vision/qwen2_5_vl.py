"""Qwen2.5-VL: Qwen2 with a vision tower."""

from asyncrl.extensions.vision.towers import tower
from asyncrl.models.families import qwen2
from asyncrl.models.family import Family, Serving

LINEAR = {
    "blocks.{block}.attn.qkv_proj": ("blocks.{block}.attn.qkv",),
    "blocks.{block}.attn.proj": ("blocks.{block}.attn.proj",),
    "blocks.{block}.mlp.gate_up_proj": ("blocks.{block}.mlp.gate_proj", "blocks.{block}.mlp.up_proj"),
    "blocks.{block}.mlp.down_proj": ("blocks.{block}.mlp.down_proj",),
    "merger.mlp.0": ("merger.mlp.0",),
    "merger.mlp.2": ("merger.mlp.2",),
}
"""An engine's linear layers with weight and bias, and transformers'."""
WITHOUT_BIAS = ("patch_embed.proj", "blocks.{block}.norm1", "blocks.{block}.norm2", "merger.ln_q")

FAMILY = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    weights=qwen2.FAMILY.weights,
    arguments=qwen2.FAMILY.arguments,
    tower=tower(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "visual.",
        engine=(
            *(
                (f"visual.{engine}.{kind}", tuple(f"visual.{part}.{kind}" for part in parts))
                for engine, parts in LINEAR.items()
                for kind in ("weight", "bias")
            ),
            *((f"visual.{name}.weight", (f"visual.{name}.weight",)) for name in WITHOUT_BIAS),
        ),
        tiny={"fullatt_block_indexes": [1], "window_size": 112},
    ),
    serving=Serving(adapters=True),
)
