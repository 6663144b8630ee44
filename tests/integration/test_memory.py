"""The planner's estimate of a trainer rank's memory is compared with the memory of real Megatron ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.plan.activations import Recompute, Training
from asyncrl.extensions.plan.memory import trainer_rank
from asyncrl.extensions.plan.settings import adapters_of, layout_of, recompute_of
from asyncrl.extensions.plan.shapes import counted, shape_of
from asyncrl.launch.checks.model_files import read_model
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

ROWS, VOCAB = 601, 64
TWO = {"trainer.tensor_parallel": 2, "trainer.sequence_parallel": True}
LORA = {"trainer.lora.rank": 8}
CLOSE = 0.08
"""Allowed relative error of the estimated activations, which omit angles and statistics."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "in float32": ("llama", {"trainer.dtype": "float32"}),
    "norms of queries and keys": ("qwen3", {}),
    "routed experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
    "norms after": ("olmo2", {}),
    "norms after, tensor parallel": ("olmo2", TWO),
    "norms after, adapters": ("olmo3", LORA),
    "norms around": ("gemma3_text", {}),
    "windows, sinks, biases and limits": ("gpt_oss", {}),
    "tensor parallel": ("qwen3", TWO),
    "replicas": ("llama", {"trainer.data_parallel": 2}),
    "expert parallel": ("qwen3_moe", {"trainer.data_parallel": 2, "trainer.expert_parallel": 2}),
    "context parallel": ("llama", {"trainer.context_parallel": 2}),
    "adapters": ("qwen3", LORA),
    "adapters of values": ("llama", {**LORA, "trainer.lora.targets": ["q_proj", "v_proj"]}),
    "adapters, tensor parallel": ("qwen3", {**LORA, **TWO}),
    "adapters of experts": ("qwen3_moe", LORA),
    "adapters of stacked experts": ("gpt_oss", LORA),
    "adapters of latent attention": ("deepseek_v3", LORA),
    "adapters on a quantized base": ("qwen3", {**LORA, "trainer.lora.base": "nf4"}),
    "recompute": ("qwen3", {"trainer.recompute.granularity": "full"}),
    "recompute, tensor parallel": ("qwen3", {**TWO, "trainer.recompute.granularity": "full"}),
    "recompute in pairs": (
        "llama",
        {"trainer.recompute.granularity": "full", "trainer.recompute.num_layers": 2},
    ),
    "recompute half": (
        "llama",
        {
            "trainer.recompute.granularity": "full",
            "trainer.recompute.method": "block",
            "trainer.recompute.num_layers": 2,
        },
    ),
    "recompute MLPs": (
        "llama",
        {"trainer.recompute.granularity": "selective", "trainer.recompute.modules": ["mlp", "layernorm"]},
    ),
    "recompute MLPs between norms after them": (
        "olmo2",
        {"trainer.recompute.granularity": "selective", "trainer.recompute.modules": ["mlp", "layernorm"]},
    ),
    "recompute experts": (
        "qwen3_moe",
        {"trainer.recompute.granularity": "selective", "trainer.recompute.modules": ["moe"]},
    ),
    "recompute up projections": (
        "deepseek_v3",
        {"trainer.recompute.granularity": "selective", "trainer.recompute.modules": ["core_attn", "mla_up_proj"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_the_planner_says(case: str, tmp_path: Path) -> None:
    arch, changes = CASES[case]
    trainer = tiny_config(**{"trainer.dtype": "bfloat16", **changes}).trainer
    sizes = {"vocab": VOCAB, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 512}
    model = tmp_path / "model"
    write_random_model(model, arch, **sizes, tied=False, seed=0, dtype=trainer.dtype, max_positions=2048)
    (model / "tokenizer.json").write_text("{}")
    told = run_ranks("memory:held", trainer, model, ROWS, VOCAB, world=trainer.world_size)

    shape = shape_of(json.loads((model / "config.json").read_text()))
    weights = counted(read_model(model, "model.path").weights.items(), shape)
    training = Training(
        dtype=trainer.dtype,
        tokens=2 * ROWS,
        logit_rows=1024,
        recompute=recompute_of(trainer),
        adapters=adapters_of(trainer.lora),
    )
    expected = trainer_rank(weights, shape, layout_of(trainer), training)
    for part in ("weights", "frozen base", "gradients", "masters", "moments"):
        most = max(rank[part] for rank in told)
        assert most == expected[part], (part, told)
    activations = max(rank["activations"] for rank in told)
    if case.startswith("recompute"):
        kept = trainer_rank(weights, shape, layout_of(trainer), replace(training, recompute=Recompute()))["activations"]
        assert activations < 0.95 * kept
    if case == "context parallel":  # ranks share the work, and so not the tokens, equally
        activations = sum(rank["activations"] for rank in told) / len(told)
    if case != "expert parallel":  # unequal loads
        assert activations == pytest.approx(expected["activations"], rel=CLOSE)
