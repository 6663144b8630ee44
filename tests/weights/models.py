"""Small models as tensors and as folders, and their digests."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.models.families import choosing_biases, known_families, of_type
from asyncrl.models.tiny import write_random_model
from asyncrl.weights import mapping
from asyncrl.weights.checksum import CudaHash

HEADS, HEAD_DIM, HIDDEN, VOCAB, EXPERTS = 4, 2, 8, 70, 3

MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama-tied": ("llama", True, {}),
    "llama": ("llama", False, {}),
    "qwen2": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-moe": ("qwen3_moe", False, {}),
    "qwen3-moe-dense-layer": ("qwen3_moe", False, {"mlp_only_layers": [1]}),
    "mixtral": ("mixtral", False, {"sliding_window": None}),
    "glm4-moe": ("glm4_moe", False, {}),
    "glm4-moe-plain-heads": ("glm4_moe", False, {"use_qk_norm": False, "attention_bias": False}),
    "deepseek-v3": ("deepseek_v3", False, {}),
    "deepseek-v3-one-query-matrix": ("deepseek_v3", False, {"q_lora_rank": None}),
}
MODELS |= {
    family.model_type: (family.model_type, number % 2 == 1, {})
    for number, family in enumerate(known_families().values())
    if not family.tower and family.model_type not in {kind for kind, *_ in MODELS.values()}
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "n_routed_experts": EXPERTS,
        "q_lora_rank": 4,
        **changes,
    }


def model(architecture: str, seed: int = 0, kv_heads: int = 2) -> dict[str, Tensor]:
    """All HF tensors that a trainer sends of a model of one layer, in its order."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for rule, weight in zip(mapping.tables()[architecture], known_families()[architecture].weights, strict=True):
        if weight.engine is None:
            continue  # trainers do not load these layers, or engines have none
        if weight.needs.startswith("not "):
            continue  # queries come through a low rank
        for expert in range(EXPERTS if rule.routed else 1):
            for pattern in rule.hf:
                name = pattern.format(layer=0, expert=expert)
                found[name] = torch.randn(shape(name, kv_heads), generator=generator).bfloat16()
    return found


def digest(tensor: Tensor, device: str = "cpu") -> str:
    if device == "cpu":
        return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    whole = CudaHash()
    whole.update(tensor)
    return whole.hexdigest()


def shape(leaf: str, kv_heads: int = 2, inner: int = 128) -> tuple[int, ...]:
    """Return the shape of an HF tensor by the end of its name."""
    queries, keys = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
        "q_proj": (queries, HIDDEN),
        "k_proj": (keys, HIDDEN),
        "v_proj": (keys, HIDDEN),
        "qkv_proj": (queries + 2 * keys, HIDDEN),
        "gate_up_proj": (2 * inner, HIDDEN),
        "o_proj": (HIDDEN, queries),
        "q_a_proj": (4, HIDDEN),
        "q_b_proj": (queries, 4),
        "kv_a_proj_with_mqa": (5, HIDDEN),
        "kv_b_proj": (2 * queries, 4),
        **dict.fromkeys(("gate", "router"), (EXPERTS, HIDDEN)),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, HIDDEN)),
        **dict.fromkeys(("down_proj", "w2"), (HIDDEN, inner)),
    }
    stacks = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * inner),
        "gate_up_proj_bias": (EXPERTS, 2 * inner),
        "down_proj": (EXPERTS, inner, HIDDEN),
        "down_proj_bias": (EXPERTS, HIDDEN),
        "sinks": (HEADS,),
    }
    kind = leaf.split(".")[-1]
    if kind in stacks:
        return stacks[kind]
    found = sizes.get(leaf.split(".")[-2], (HIDDEN,))
    return (EXPERTS,) if kind in choosing_biases() else found[:1] if kind == "bias" else found


def as_published(folder: Path, kind: str) -> None:
    """Transpose stacked experts of a vision model that transformers wrote. Publishers' are transposed, and so SGLang
    reads them; transformers reads both."""
    stacks = {rule.hf[0] for rule in mapping.tables()[of_type(kind).architecture] if rule.stacked}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if re.sub(r"layers\.\d+", "layers.{layer}", name) in stacks:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def written(folder: Path, name: str) -> Path:
    """A small model in bfloat16 with an odd vocabulary, and stand-ins for a tokenizer's files."""
    arch, tied, fields = MODELS[name]
    sizes: dict[str, Any] = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 48}
    write_random_model(folder, arch, vocab=97, tied=tied, seed=1, dtype="bfloat16", fields=fields, **sizes)
    (folder / "tokenizer.json").write_text('{"of": "any kind"}')
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_text("{{ tool }}")
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors; each stands in one file."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        assert not found.keys() & held.keys()
        found.update(held)
    return found
