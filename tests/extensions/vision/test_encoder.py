"""Pixels as the vision tower reads them."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.extensions.vision.encoder import Normalisation  # noqa: E402
from asyncrl.extensions.vision.sizes import ImageShape  # noqa: E402
from tests.integration.vision import picture  # noqa: E402


@pytest.mark.parametrize(("patch", "width", "height"), [(14, 84, 56), (16, 32, 96)])
def test_patches_are_those_of_the_processor_of_transformers(patch: int, width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mean, std, png = (0.48, 0.45, 0.4), (0.27, 0.26, 0.28), picture(5, width, height)
    processor = Qwen2VLImageProcessorPil(
        min_pixels=1, max_pixels=10**6, patch_size=patch, image_mean=list(mean), image_std=list(std)
    )
    expected = processor(images=[Image.open(io.BytesIO(png))], return_tensors="pt")["pixel_values"]
    found = Normalisation(ImageShape(patch, 2), 2, mean, std).patches(png, torch.device("cpu"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
