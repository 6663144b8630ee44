"""The size of an image, the number of tokens that a model reads for one, and the positions of these tokens (M-RoPE).

Images enter a model that sees at its embedding only, as tokens that attend causally like text. What follows the
embedding is therefore the text model of the family that the config describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.models.family import HF

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height from the header of a PNG file. Raises ValueError for anything else."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    if not png.startswith(SIGNATURE) or png[12:16] != b"IHDR" or not width or not height:
        raise ValueError(f"{png[:24]!r} does not begin a PNG file")
    return width, height


@dataclass(frozen=True)
class ImageShape:
    """How a model cuts an image into tokens: square patches, `merge` times `merge` of them for one token."""

    patch: int  # pixels
    merge: int

    def grid(self, png: bytes) -> tuple[int, int, int]:
        """Return the number of patches in time, height and width. Raises ValueError for an image of another size than
        `fitted_size` gives."""
        width, height = png_size(png)
        if width % self.side or height % self.side:
            raise ValueError(f"an image of {width} x {height} pixels is not a multiple of {self.side} pixels")
        return 1, height // self.patch, width // self.patch

    def tokens(self, png: bytes) -> int:
        """Return the number of tokens that an image takes in the model's context."""
        return math.prod(self.grid(png)) // self.merge**2

    @property
    def side(self) -> int:
        """Pixels of the side of the square that one token sees."""
        return self.patch * self.merge


def image_shape(hf: HF) -> ImageShape:
    """Return how the model cuts images into tokens."""
    vision = hf["vision_config"]
    return ImageShape(vision.get("patch_size", 14), vision.get("spatial_merge_size", 2))


def deepstack(hf: HF) -> int:
    """Return after how many of the first text layers further features of images are added to their tokens
    (arXiv 2406.04334)."""
    return len(hf["vision_config"].get("deepstack_visual_indexes") or ())


def forbidden_ids(hf: HF) -> list[int]:
    """Return the ids that the policy must not sample, because a later turn's prompt would announce an image that is not
    there: placeholders, and the marks around them."""
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return sorted(hf[mark] for mark in marks if mark in hf)


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
