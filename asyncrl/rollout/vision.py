"""How the model of a run reads images, from its folder and the run's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config.generation import ImagesConfig
from asyncrl.errors import ConfigError
from asyncrl.images import ImageTokens, fitted_size
from asyncrl.images.decoder import ImageDecoder, ImageSizes, Vision
from asyncrl.models.vision import forbidden_ids, image_shape

PROCESSOR = "preprocessor_config.json"


def vision_of(model: Path, hf: dict[str, Any], settings: ImagesConfig) -> Vision | None:
    """Return how a model folder reads images, or None if it is a text model. `hf` is its config.json.

    Raises ConfigError if the settings leave no room for an image.
    """
    if (shape := image_shape(hf)) is None:
        return None
    least, most = _limits(model)
    most = min(most, settings.max_pixels or most)
    try:
        fitted_size(shape.side, shape.side, shape.side, least, most)
    except ValueError as error:
        remedy = f"{error}, the least in {model / PROCESSOR}: raise it."
        raise ConfigError("rollout.images.max_pixels", settings.max_pixels, remedy) from None
    start, placeholder, end = (hf[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    tokens = ImageTokens(start, placeholder, end, forbidden_ids(hf), shape, settings.max_images)
    sizes = ImageSizes(shape.side, least, most)
    return Vision(tokens, ImageDecoder(sizes, settings.max_bytes), most // shape.side**2)


def _limits(model: Path) -> tuple[int, int]:
    """Return the least and the most pixels of an image of the model's own processor, in either of the forms that
    transformers reads. Raises ConfigError if there is none."""
    try:
        found = json.loads((model / PROCESSOR).read_text())
    except (OSError, ValueError) as error:
        remedy = f"It has a vision tower, but {PROCESSOR} cannot be read ({error}): copy it from the model's source."
        raise ConfigError("model.path", str(model), remedy) from None
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **(found.get("size") or {})}
    return found.get("min_pixels") or size["shortest_edge"], found.get("max_pixels") or size["longest_edge"]
