"""Names and shapes that are told from a config are those of the files that transformers writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.plan.shapes import tower_parameters
from asyncrl.extensions.plan.tensors import tensors
from asyncrl.launch.checks.model_files import read_model
from asyncrl.models.architectures import flat
from asyncrl.models.families import known_families, of_type
from asyncrl.models.tiny import write_random_model
from scripts.sizes import MODELS

SIZES: dict[str, Any] = {"vocab": 70, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
PUBLISHED = {"qwen3_8b": 8.19, "llama3_70b": 70.6, "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235.1}
"""Billions of parameters, as their publishers count them."""


TEXT = [family for family in known_families().values() if not family.tower]
CASES = [
    pytest.param(family.model_type, dict(fields), id=f"{family.model_type}-{number}")
    for family in TEXT
    for number, fields in enumerate(({}, *family.variants))
]


@pytest.mark.parametrize(("arch", "fields"), CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_a_folder(arch: str, fields: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    latent = "kv_lora_rank" in of_type(arch).tiny
    sizes = {**SIZES, "kv_heads": 4} if latent else SIZES
    width = {} if latent else {"head_dim": 16}
    write_random_model(tmp_path, arch, **sizes, tied=tied, seed=0, dtype="bfloat16", fields={**width, **fields})
    hf = json.loads((tmp_path / "config.json").read_text())
    assert sorted(tensors(hf)) == sorted(read_model(tmp_path, "model.path").weights.items())


def test_a_family_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*Supported architectures"):
        list(tensors({"architectures": ["MambaForCausalLM"], "hidden_size": 1, "vocab_size": 1}))


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_the_published_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    count = sum(math.prod(shape) for _, shape in tensors(MODELS[name]))
    assert count / 1e9 == pytest.approx(PUBLISHED[name], abs=0.05)
    kinds = {"L": "llama", "Qwen3F": "qwen3", "Qwen3M": "qwen3_moe"}
    kind = next(kind for start, kind in kinds.items() if MODELS[name]["architectures"][0].startswith(start))
    fields = {key: value for key, value in MODELS[name].items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, tie_word_embeddings=False, **fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("arch", [one.model_type for one in known_families().values() if one.tower])
def test_number_of_a_towers_parameters_follows_from_the_config(arch: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny_vision = pytest.importorskip("asyncrl.extensions.vision.tiny")
    tiny_vision.write(tmp_path / "model", arch)
    hf = flat(json.loads((tmp_path / "model" / "config.json").read_text()))
    tower = of_type(arch).tower
    assert tower is not None
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tower_parameters(hf) == sum(one.numel() for name, one in tensors.items() if name.startswith(tower.prefix))
