"""The sizes to which the processors of Qwen's models bring images. The process that decodes imports this module."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of the images that a model reads: multiples of `side`, with `least` to `most` pixels."""

    side: int
    least: int
    most: int


def fitted_size(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the width and height to which the processors of Qwen's models resize an image: multiples of `side` with
    `least` to `most` pixels in all, which keep the ratio as far as that allows.

    The result is a fixed point: a processor with these limits leaves an image of that size as it is. Raises ValueError
    if `most` is below four times `least`, because rounding could then break one limit whenever it keeps the other.
    """
    if most < 4 * least:
        raise ValueError(f"{most} pixels are fewer than four times {least}")
    while (fitted := _resized(width, height, side, least, most)) != (width, height):
        width, height = fitted
    return fitted


def _resized(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return what `smart_resize` of transformers (models/qwen2_vl) returns, with the width first."""
    found = round(width / side) * side, round(height / side) * side
    if math.prod(found) > most:
        scale = math.sqrt(width * height / most)
        return max(side, math.floor(width / scale / side) * side), max(side, math.floor(height / scale / side) * side)
    if math.prod(found) < least:
        scale = math.sqrt(least / (width * height))
        return math.ceil(width * scale / side) * side, math.ceil(height * scale / side) * side
    return found
