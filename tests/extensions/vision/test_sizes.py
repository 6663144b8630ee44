"""Sizes of images: those of transformers, and fixed points of them."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from asyncrl.extensions.vision.fitting import fitted_size
from asyncrl.extensions.vision.sizes import ImageShape, png_size

QWEN = ImageShape(patch=14, merge=2)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_size_and_grid_are_read_from_the_header() -> None:
    assert png_size(png(84, 56)) == (84, 56)
    assert QWEN.grid(png(84, 56)) == (1, 4, 6)
    assert QWEN.tokens(png(84, 56)) == 6


@pytest.mark.parametrize("file", [b"", b"GIF89a", png(28, 28)[:20]])
def test_what_is_no_png_file_has_no_size(file: bytes) -> None:
    with pytest.raises(ValueError, match="PNG"):
        png_size(file)


def test_an_image_that_the_processor_would_resize_has_no_grid() -> None:
    with pytest.raises(ValueError, match="30 x 28 pixels is not a multiple of 28"):
        QWEN.grid(png(30, 28))


def test_sizes_are_those_of_transformers_and_stay() -> None:
    numbers = random.Random(0)
    alike = 0
    for _ in range(2000):
        width, height = numbers.randint(1, 3000), numbers.randint(1, 3000)
        if max(width, height) > 150 * min(width, height):
            continue
        least = 28 * 28 * numbers.randint(1, 8)
        most = least * numbers.randint(4, 400)
        found = fitted_size(width, height, 28, least, most)
        assert smart_resize(found[1], found[0], 28, least, most) == found[::-1]
        alike += smart_resize(height, width, 28, least, most) == found[::-1]
    assert alike > 1900  # the others are so long that transformers itself would resize them twice


def test_limits_that_rounding_cannot_keep_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer than four times"):
        fitted_size(84, 84, 28, 7 * 784, 8 * 784)
