"""The tiny model that sees: a Qwen2.5-VL with random weights, which reads single characters and small images.

It learns colours of squares with a random, frozen vision tower. An image of 56 x 56 pixels takes 4 tokens. Patches
have the published size, because SGLang's code contains the width of a patch. torch and transformers are imported inside
functions, because the launcher imports this module (models/catalog.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.models.catalog import Builtin
from asyncrl.models.families import of_type
from asyncrl.models.tiny import save_random, tokenizer_json, write_tokenizer

EOS, PAD, UNK = "<|im_end|>", "<|endoftext|>", "<unk>"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = (PAD, "<|im_start|>", EOS, *MARKS)
TOKENS = (*"0123456789abcdefghijklmnopqrstuvwxyz ?=", UNK, *SPECIAL)
"""The vocabulary; a token's index is its id."""
MAX_POSITIONS = 512

TEXT = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '=' + message['content'] + '<|im_end|>' }}"
    "{% elif message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)


def write(folder: Path, arch: str = "qwen2_5_vl", *, spread: float = 0.02, seed: int = 0, **sizes: Any) -> None:
    """Write the model, its tokenizer and its image processor's settings into the new folder `folder`; the bytes are the
    same every time. Also one of another type (qwen3_vl, qwen3_vl_moe), or with other weights or sizes of its text
    model, such as `num_hidden_layers` or `tie_word_embeddings`. `spread` is the standard deviation of the weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    ids = {token: number for number, token in enumerate(TOKENS)}
    ends = {"bos_token_id": ids[PAD], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    family = of_type(arch)
    assert family.tower is not None
    text = {**TEXT, **family.tiny, **ends, **sizes}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    marks = {name: ids[mark] for name, mark in zip(names, MARKS, strict=True)}
    tied = bool(text.get("tie_word_embeddings"))
    vision = {**VISION, "out_hidden_size": text["hidden_size"], **family.tower.tiny}
    parts = {"text_config": text, "vision_config": vision}
    config = AutoConfig.for_model(arch, **parts, tie_word_embeddings=tied, **ends, **marks)
    save_random(AutoModelForImageTextToText, config, folder, "float32", ends, seed, spread)
    special = {"bos_token": PAD, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK}
    write_tokenizer(folder, tokenizer_json(TOKENS, UNK, (UNK, *SPECIAL)), CHAT_TEMPLATE, special, MAX_POSITIONS)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")


BUILTIN = Builtin(write, 1, "writing random weights, about 10 s")
