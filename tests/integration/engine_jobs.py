"""Models of every family for engine_ranks.py, and its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from asyncrl.config import Config, load
from asyncrl.launch.main import CONF
from asyncrl.models.families import of_type
from asyncrl.parallel import EngineParallel
from tests.integration.families import PUBLISHED_AS, retyped

SIZES = {
    "vocab_size": 197,  # divides by nothing
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {  # the only kind that SGLang has for this family on CPU
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama, padded": ("llama", {"num_key_value_heads": 1, "intermediate_size": 72}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", ROUTED),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", {**GROUPED, **LATENT, "q_lora_rank": 32}),
    "deepseek_v3, whole queries": ("deepseek_v3", {**GROUPED, **LATENT, "q_lora_rank": None}),
}
OF_ONE_KIND = (
    "mistral",
    "ministral3",
    "seed_oss",
    "smollm3",
    "ernie4_5",
    "phi3",
    "gpt_oss",
    "gemma3_text",
)  # as their records make them
MODELS |= {name: (name, dict(of_type(name).tiny)) for name in OF_ONE_KIND}
MODELS["hy_v3"] = ("hy_v3", {**of_type("hy_v3").tiny, "moe_intermediate_size": 64})
MODELS["glm4_moe_lite"] = ("glm4_moe_lite", {**GROUPED, **LATENT, "q_lora_rank": 32, "n_group": 1})
MODELS["kimi-k2"] = ("deepseek_v3", {**GROUPED, **LATENT, "q_lora_rank": 32, "n_group": 1})
EVERYTHING = ("qwen3_moe", EngineParallel(tp=2, ep=2, dp=2, pp=2))


def named(value: object) -> str | None:
    return "-".join(map(str, astuple(value))) if isinstance(value, EngineParallel) else None


def write_model(folder: Path, model_type: str, changes: dict[str, Any]) -> None:
    """Write an HF folder with random weights in which all layers and all experts differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # norms and biases would otherwise all be equal
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.randn(module.e_score_correction_bias.shape)  # float32, as released
    model.save_pretrained(folder)
    if folder.name in PUBLISHED_AS:
        retyped(folder, PUBLISHED_AS[folder.name])


def engine_of(shape: EngineParallel) -> Config:
    """Return the configuration with the settings that matter here."""
    fields = ("tensor_parallel", "expert_parallel", "data_parallel", "pipeline_parallel")
    sizes = [f"engine.{field}={size}" for field, size in zip(fields, astuple(shape), strict=True)]
    with initialize_config_dir(str(CONF), version_base=None):
        raw: Any = OmegaConf.to_container(
            compose("train", ["experiment=tiny", "engine.dtype=bfloat16", *sizes]), resolve=True
        )
    return load(raw)


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> Path:
    """Run jobs of engine_ranks.py, and return their log. Many take longer than the usual ones."""
    plan, log = folder / "jobs.json", folder / "jobs.log"
    plan.write_text(json.dumps(jobs))
    with log.open("w") as out:
        command = [sys.executable, "-m", "tests.integration.engine_ranks", str(plan)]
        subprocess.run(command, stdout=out, stderr=out, check=True, timeout=max(600, 60 * len(jobs)))
    return log
