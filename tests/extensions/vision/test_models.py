"""Configs of models that see, and the positions of image tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.extensions.vision import tiny as tiny_vision
from asyncrl.extensions.vision.sizes import ImageShape, forbidden_ids, image_shape, mrope
from asyncrl.models.architectures import flat, rope_axes
from asyncrl.models.parts import rotary

TEXT = {"vocab_size": 47, "hidden_size": 64, "tie_word_embeddings": False, "model_type": "qwen2_5_vl_text"}
TOP = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "image_token_id": 45,
    "video_token_id": 46,
    "vision_start_token_id": 43,
    "vision_end_token_id": 44,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}


def test_both_layouts_of_a_config_give_the_same_view() -> None:
    nested, published = {**TOP, "text_config": TEXT}, {**TEXT, **TOP}
    assert flat(nested) == flat(published) == flat(flat(nested)) == published
    assert image_shape(flat(nested)) == ImageShape(14, 2)
    assert forbidden_ids(flat(nested)) == [43, 44, 45, 46]
    assert flat(TEXT) == TEXT


parts = st.lists(st.integers(1, 5) | st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4)), max_size=8)


@settings(max_examples=60)
@given(parts)
def test_positions_equal_those_of_transformers(parts: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    ids, grids = [7], []
    for part in parts:
        if isinstance(part, int):
            ids += [3] * part
        else:  # between two images there is always text: the marks around each
            grids.append((part[0], 2 * part[1], 2 * part[2]))
            ids += [5, *range(47, 47 + part[1] * part[2]), 6]
    is_image = torch.tensor(ids)[None] >= 47
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    expected, _ = Qwen2_5_VLModel.get_rope_index(
        model, torch.tensor(ids)[None], is_image.int(), image_grid_thw=torch.tensor(grids).reshape(-1, 3)
    )
    np.testing.assert_array_equal(mrope(ids, grids, 47, 2), expected[:, 0].numpy())


def test_tiny_vision_model_loads_in_transformers_and_sees(tmp_path: Path) -> None:
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = tmp_path / "model"
    tiny_vision.write(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "c"}]
    question = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "c", "="]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    assert 0.25e6 < model.num_parameters() < 0.45e6
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    with torch.no_grad():
        logits = [
            model(
                input_ids=torch.tensor([[ids[0], *[ids[1]] * 4, *ids[2:]]]),
                mm_token_type_ids=torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0]]),
                **processor(images=[image], return_tensors="pt"),
            ).logits[0, -1]
            for image in images
        ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3  # the tower does not ignore its input


def test_rotated_pairs_follow_blocks_or_turns() -> None:
    sections, sees = {"mrope_section": [3, 2, 2]}, {"architectures": ["Qwen3VLForConditionalGeneration"]}
    assert rope_axes({**sees, "rope_parameters": sections}) == [0, 0, 0, 1, 1, 2, 2]
    assert rope_axes({**sees, "rope_parameters": {**sections, "mrope_interleaved": True}}) == [0, 1, 2, 0, 1, 2, 0]
    published = {**sees, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", **sections}}
    assert rope_axes(published) == rope_axes({**sees, "rope_parameters": sections})
    assert (rotary(published)["rope_type"], rotary(published)["rope_theta"]) == ("default", 1e6)
    assert rope_axes(sees) is None
