"""What the towers of all families here have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from asyncrl.extensions.vision.sizes import deepstack
from asyncrl.models.family import HF, Tower

READER = "asyncrl.extensions.vision.reader:vision_of"
ENCODER = "asyncrl.extensions.vision.encoder:ImageEncoder"


def tower(
    module: str,
    prefix: str,
    *,
    engine: tuple[tuple[str, tuple[str, ...]], ...] = (),
    tiny: Mapping[str, Any] = MappingProxyType({}),
) -> Tower:
    """Return a tower that reads and encodes images as this folder does."""
    return Tower(module, prefix, READER, ENCODER, tower_parameters, engine=engine, tiny=tiny)


def tower_parameters(hf: HF) -> int:
    """Return the number of parameters of the vision tower."""
    vision, levels = hf["vision_config"], deepstack(hf)
    wide, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = wide * vision.get("spatial_merge_size", 2) ** 2
    pixels = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2
    attention, merger = 4 * (wide + 1) * wide, (merged + 1) * (merged + out)
    if "num_position_embeddings" not in vision:  # Qwen2.5-VL: gated MLPs, and norms without biases
        mlp = 2 * (wide + 1) * inner + (inner + 1) * wide
        return int(pixels * wide + vision["depth"] * (attention + mlp + 2 * wide) + wide + merger)
    mlp, places = (wide + 1) * inner + (inner + 1) * wide, vision["num_position_embeddings"] * wide
    mergers = 2 * wide + merger + levels * (2 * merged + merger)
    return int((pixels + 1) * wide + places + vision["depth"] * (attention + mlp + 4 * wide) + mergers)
