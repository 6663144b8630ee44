"""Models and batch of test_families.py, shared with its ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.algo.samples import Sample

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
# transformers' model type, tied embeddings, and config fields besides models/tiny.py's
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama-tied": ("llama", True, {}),
    "llama3-rope": ("llama", False, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-moe": ("qwen3_moe", False, {"mlp_only_layers": [1]}),
    "qwen3-moe-unnormalized": ("qwen3_moe", True, {"norm_topk_prob": False}),
    "mixtral": ("mixtral", False, {}),
    "glm4-moe": ("glm4_moe", False, {}),
    "glm4-moe-plain-heads": ("glm4_moe", False, {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 1}),
    "deepseek-v3": ("deepseek_v3", False, {}),
    "deepseek-v3-one-query-matrix": ("deepseek_v3", False, {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek-v3-yarn": ("deepseek_v3", False, {"rope_parameters": YARN}),
}
EXPERTS = [name for name, (kind, _, _) in MODELS.items() if kind not in ("llama", "qwen2", "qwen3")]
CHOOSES = "e_score_correction_bias"  # of a router; a buffer without gradient


def groups() -> list[list[Sample]]:
    """Return two prompts with a common prefix and two completions each."""
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 257, (count,), generator=draw).tolist()

    head = tokens(10)
    made = []
    for tail in (3, 6):
        prompt = head + tokens(tail)
        ends = [tokens(count) for count in (5, 8)]
        made.append([Sample(prompt, ids, [True] * len(ids), 0, 0) for ids in ends])
    return made


def factors(group: int, vocab: int) -> Tensor:
    """Return the factors of the logits in the function whose gradient is taken: [T, vocab]."""
    targets = sum(len(sample.token_ids) for sample in groups()[group])
    return torch.randn(targets, vocab, generator=torch.Generator().manual_seed(group)) / targets
