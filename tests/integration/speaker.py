"""Small model of random weights that writes text: it has SmolLM2's tokenizer and prefers some words."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from asyncrl.extensions.smollm2 import model as smollm2
from asyncrl.models import catalog, tiny

FEATURE = 0
"""Index of the feature that is the same in every token's embedding; layers of small weights change it little."""
LIKING = 12.0
"""Margin of the preferred words' logits: about one word in seventy is another one."""
VOCABULARY, WIDTH = 49152, 64


def write_speaker(folder: Path, words: Sequence[str], *, ends: float = 0.3, positions: int = 2048) -> None:
    """Write to the new folder `folder` a Llama of width 64 that says these words, one token each, in any context.

    A fraction `ends` of its tokens is the end of an answer.
    """
    tiny.write_random_model(
        folder,
        "llama",
        vocab=VOCABULARY,
        hidden=WIDTH,
        layers=1,
        heads=4,
        kv_heads=4,
        intermediate=128,
        tied=False,
        seed=0,
        dtype="float32",
        max_positions=positions,
        bos_eos_pad=(smollm2.BOS_ID, smollm2.EOS_ID, smollm2.EOS_ID),
    )
    read = catalog.resolve("builtin:smollm2-135m")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(read / name, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    liked = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    assert all(len(ids) == 1 for ids in liked), words
    weights = load_file(folder / "model.safetensors")
    embedded = weights["model.embed_tokens.weight"]
    embedded[:, FEATURE] = 1.0
    unit = float((embedded / embedded.square().mean(1, keepdim=True).sqrt())[:, FEATURE].mean())  # behind a norm
    head = weights["lm_head.weight"]
    head[[ids[0] for ids in liked], FEATURE] = LIKING / unit
    head[smollm2.EOS_ID, FEATURE] = (LIKING + math.log(len(words) * ends / (1 - ends))) / unit
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
