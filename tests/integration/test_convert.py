"""Real Megatron loads the output of asyncrl-convert in every layout, and asyncrl-convert reads Megatron's checkpoints.

One launch per number of ranks covers all layouts and models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from asyncrl.extensions.convert.cli import main
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.families import TEXT
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

# transformers' model type, tied embeddings, and config fields besides models/tiny.py's
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama-tied": ("llama", True, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen3": ("qwen3", False, {}),
    "olmo3": ("olmo3", False, {}),
    "qwen3-moe": ("qwen3_moe", False, {"mlp_only_layers": [1]}),
    "mixtral": ("mixtral", False, {"sliding_window": None}),
    "glm4-moe": ("glm4_moe", False, {}),
    "deepseek-v3": ("deepseek_v3", False, {}),
    "deepseek-v3-one-query-matrix": ("deepseek_v3", False, {"q_lora_rank": None}),
}
DIVIDED, EXPERTS = list(MODELS), list(MODELS)[4:]
MODELS |= {
    family.model_type: (family.model_type, False, {})
    for family in TEXT
    if family.model_type not in {kind for kind, *_ in MODELS.values()}
}
"""Models for layouts with tensor parallelism, and one of each other family."""
ALL = list(MODELS)
CASES: dict[int, dict[str, tuple[dict[str, Any], list[str]]]] = {
    1: {"single": ({}, ALL)},
    2: {
        "tp2": ({"tensor_parallel": 2}, [*DIVIDED, "olmo2"]),
        "pp2": ({"pipeline_parallel": 2}, ALL),
        "pp2-vpp2": ({"pipeline_parallel": 2, "virtual_pipeline": 2}, ["llama-tied", "qwen3-moe"]),
        "ep2": ({"expert_parallel": 2, "data_parallel": 2}, [*EXPERTS, "gpt_oss"]),
        "tp2-etp1-ep2": (
            {"tensor_parallel": 2, "expert_tensor_parallel": 1, "expert_parallel": 2},
            ["qwen3-moe", "glm4-moe", "gpt_oss"],
        ),
    },
}
LOADS = [(ranks, layout, name) for ranks in CASES for layout, (_, names) in CASES[ranks].items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every model as an HF folder and as the checkpoint converted from it."""
    made = tmp_path_factory.mktemp("convert")
    sizes: dict[str, Any] = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 48}
    for name, (arch, tied, fields) in MODELS.items():
        dtype: Any = "float32" if name == "qwen3" else "bfloat16"
        write_random_model(made / name / "hf", arch, vocab=97, tied=tied, seed=2, dtype=dtype, fields=fields, **sizes)
        assert main(["to-megatron", str(made / name / "hf"), str(made / name / "megatron")]) == 0
    return made


@cache
def found(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the findings of each rank."""
    return run_ranks("convert:saved_again", folder, tiny_config().trainer, CASES[ranks], world=ranks)


@pytest.mark.parametrize(("ranks", "layout", "name"), LOADS)
def test_megatron_loads_the_converted_checkpoint_bit_for_bit(folder: Path, ranks: int, layout: str, name: str) -> None:
    for of_rank in found(folder, ranks):
        case = of_rank[f"{layout}/{name}"]
        assert case["names"]
        assert case["same names"]
        assert case["different"] == []
        assert case["untouched"] == []


@pytest.mark.parametrize(("ranks", "layout", "name"), LOADS)
def test_what_megatron_saved_becomes_the_folder_it_came_from(folder: Path, ranks: int, layout: str, name: str) -> None:
    assert found(folder, ranks)
    model = folder / name
    saved, back = model / f"saved-{layout}", model / f"back-{layout}"
    assert main(["to-hf", str(saved), str(back), "--model", str(model / "hf"), "--shard-gb", "0.0001"]) == 0
    assert described(back) == described(model / "hf")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_holds_what_megatron_itself_saves(folder: Path, name: str) -> None:
    assert found(folder, 1)
    ours, megatrons = (entries(folder / name / made) for made in ("megatron", "saved-single"))
    assert ours == megatrons


def entries(checkpoint: Path) -> dict[str, Any]:
    """Return precision and unsharded shape of every tensor, and the objects, by key."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key: (entry.properties.dtype, entry.size) if isinstance(entry, TensorStorageMetadata) else "object"
        for key, entry in metadata.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_result_and_answers_as_before(folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    back = folder / name / "back"
    assert main(["to-hf", str(folder / name / "megatron"), str(back), "--shard-gb", "0.0001"]) == 0
    ids = torch.arange(20)[None] * 3
    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (folder / name / "hf", back)]
    with torch.no_grad():
        one, other = (model.eval()(ids).logits for model in models)
    assert one.equal(other)


def described(model: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: (tensor.dtype, tensor.shape, raw(tensor)) for name, tensor in tensors.items()}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
