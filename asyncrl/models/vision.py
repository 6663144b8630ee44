"""Models that see: the text model inside their config, their image tokens, and the positions of these (M-RoPE).

Images enter such a model at its embedding only, as tokens that attend causally like text. What follows the embedding is
therefore the text model of the family that the config describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from asyncrl.images import ImageShape
from asyncrl.models.families import FAMILIES
from asyncrl.models.family import HF

WHOLE = ("architectures", "model_type", "tie_word_embeddings", "dtype")
"""Fields that describe the whole model if both it and its text model have them."""


TOWERS = {name: family.tower for name, family in FAMILIES.items() if family.tower}
"""The models that see, by architecture."""


def flat(hf: HF) -> HF:
    """Return a config with the fields of the text model at the top, in either layout: transformers 5 writes them into
    `text_config`, and the published folders of Qwen2.5-VL have them at the top already. Fields that it leaves out have
    the family's defaults."""
    text = hf.get("text_config") or {}
    own = {name: value for name, value in hf.items() if name != "text_config" and (name in WHOLE or name not in text)}
    family = FAMILIES.get((hf.get("architectures") or [""])[0])
    return {**(family.defaults if family else {}), **text, **own}


def image_shape(hf: HF) -> ImageShape | None:
    """Return how the model cuts images into tokens; None for a text model."""
    if "vision_config" not in hf:
        return None
    vision = hf["vision_config"]
    return ImageShape(vision.get("patch_size", 14), vision.get("spatial_merge_size", 2))


def deepstack(hf: HF) -> int:
    """Return after how many of the first text layers further features of images are added to their tokens
    (arXiv 2406.04334)."""
    return len((hf.get("vision_config") or {}).get("deepstack_visual_indexes") or ())


def forbidden_ids(hf: HF) -> list[int]:
    """Return the ids that the policy must not sample, because a later turn's prompt would announce an image that is not
    there: placeholders, and the marks around them."""
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return sorted(hf[mark] for mark in marks if mark in hf) if "vision_config" in hf else []


def mrope(ids: Sequence[int] | np.ndarray, grids: Iterable[tuple[int, int, int]], vocab: int, merge: int) -> np.ndarray:
    """Return the position of each token in time, height and width, [3, T], as transformers' `get_rope_index` does. Ids
    from `vocab` on are image tokens; `grids` are their images' patches in time, height and width, in order."""
    parts, at, i = [np.zeros((3, 0), np.int64)], 0, 0
    starts = np.flatnonzero(np.asarray(ids) >= vocab)
    for t, h, w in grids:
        start = int(starts[np.searchsorted(starts, i)])
        height, width = h // merge, w // merge
        parts.append(np.tile(at + np.arange(start - i), (3, 1)))
        at += start - i
        parts.append(at + np.indices((t, height, width)).reshape(3, -1))
        at, i = at + max(height, width), start + t * height * width
    parts.append(np.tile(at + np.arange(len(ids) - i), (3, 1)))
    return np.concatenate(parts, 1)
