"""What a quantized base refuses, which layers it takes, and its bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl import lookup  # noqa: E402
from asyncrl.errors import ConfigError  # noqa: E402
from asyncrl.extensions.lora.bases import base_format, bases  # noqa: E402
from asyncrl.extensions.qlora.packed import quantize  # noqa: E402
from asyncrl.extensions.qlora.stored import QuantizedBase  # noqa: E402
from asyncrl.launch import precision  # noqa: E402
from asyncrl.launch.checks.model import check_model  # noqa: E402
from asyncrl.models.families import known_families  # noqa: E402
from tests.fakes import tiny_config  # noqa: E402

BASE: dict[str, Any] = {"trainer.lora.rank": 4, "trainer.lora.base": "nf4"}
BLOCKS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, None),
        ({"trainer.lora.targets": ["q_proj", "o_proj"], "trainer.tensor_parallel": 2}, None),
        ({"trainer.tensor_parallel": 2}, r"each of 2 ranks has 96 inputs of down_proj: lower trainer\.tensor_parallel"),
        ({"hidden_size": 96, "head_dim": 16}, "each of 1 ranks has 96 inputs of gate_proj, k_proj"),
    ],
)
def test_layer_that_would_cut_blocks_is_refused(changes: dict[str, Any], remedy: str | None) -> None:
    settings = {name: value for name, value in changes.items() if name.startswith("trainer.")}
    hf = {**BLOCKS, **{name: value for name, value in changes.items() if name in BLOCKS}}
    with pytest.raises(ConfigError, match=remedy) if remedy else nullcontext():
        check_model(tiny_config(**BASE, **settings), hf)


@pytest.mark.parametrize("architecture", [name for name, family in known_families().items() if family.stacks])
def test_a_base_whose_files_stack_the_experts_is_refused(architecture: str) -> None:
    stacked = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    windows = {"sliding_window": 4, "layer_types": ["full_attention"] * 4}
    hf = {**BLOCKS, **stacked, **windows, "architectures": [architecture], "use_sliding_window": False}
    hf |= {"vision_config": {}}  # of models that see
    check_model(tiny_config(**{**BASE, "trainer.lora.base": "none"}), hf)
    with pytest.raises(ConfigError, match="stack the experts, which a stored base has one by one: set none") as caught:
        check_model(tiny_config(**BASE), hf)
    assert caught.value.field == "trainer.lora.base"


def test_only_megatrons_own_layers_compute_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_problem", lambda gpu: None)
    config = tiny_config(**BASE, **{"trainer.dtype": "bfloat16", "trainer.layers": "auto"})
    resolved = lookup.active(config)["lora"].launch().resolved(config, BLOCKS, 8)
    assert precision.resolve_layers(resolved, 8).trainer.layers == "local"
    with pytest.raises(ConfigError, match=r"trainer\.layers.*quantized base.*set local"):
        tiny_config(**BASE, **{"trainer.layers": "transformer_engine"})


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_planned_bytes_are_those_of_codes_and_scales(kind: Any) -> None:
    lora = tiny_config(**BASE | {"trainer.lora.base": kind}).trainer.lora
    weight = torch.randn(128, 256)
    assert quantize(weight, kind).nbytes == weight.numel() * bases()[kind].bytes
    assert isinstance(base_format(lora.base), QuantizedBase)
