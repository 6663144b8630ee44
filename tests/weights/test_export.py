"""An exported folder: whole or not there, and its config says what its weights are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from asyncrl.errors import WeightsError
from asyncrl.parallel import Parallel
from asyncrl.weights.export import save_hf


class Held:
    """Weights, as a Resharder gives them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.dtype, tensor.shape

    def hf_tensors(self, *, merged: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


@pytest.fixture
def alone() -> Iterator[Parallel]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    numbers = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "etp": 1, "ep": 1}
    ranks = {f"{name}_rank": 0 for name in (*numbers, "edp")}
    yield Parallel(
        rank=0, **numbers, **ranks, device=torch.device("cpu"), tp_group=group, expert_group=group
    )  # fmt: skip
    dist.destroy_process_group()


def test_export_has_new_weights_without_multi_token_layers(alone: Parallel, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    kept = {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid", "a_field": "of the publisher's code"}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    given = {**kept, "num_nextn_predict_layers": 1, "torch_dtype": "float16", "quantization_config": fp8}
    (source / "config.json").write_text(json.dumps(given))
    (source / "tokenizer.json").write_text("{}")
    save_file({"old": torch.zeros(2)}, source / "model-00001-of-00009.safetensors")
    new = {"model.norm.weight": torch.arange(3.0)}

    save_hf(target, source, Held(new), alone, "bfloat16")

    assert sorted(file.name for file in target.iterdir()) == [
        "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    assert load_file(target / "model-00001-of-00001.safetensors")["model.norm.weight"].tolist() == [0.0, 1.0, 2.0]
    config = json.loads((target / "config.json").read_text())
    assert config == {**kept, "num_nextn_predict_layers": 0, "dtype": "bfloat16"}
    assert json.loads((target / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"},
    }


def test_export_keeps_multi_token_layers_unchanged(alone: Parallel, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    names = ("model.norm.weight", "model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight")
    save_file({name: torch.full((2,), float(place)) for place, name in enumerate(names)}, source / "model.safetensors")

    save_hf(target, source, Held({names[0]: torch.full((2,), 9.0)}), alone, "float32")
    found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    values = {name: tensor.tolist() for name, tensor in found.items()}
    assert values == {names[0]: [9.0, 9.0], names[1]: [1.0, 1.0], names[2]: [2.0, 2.0]}
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_config_stays_silent_on_multi_token_prediction(alone: Parallel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_hf(tmp_path / "target", source, Held({"a": torch.zeros(1)}), alone, "float32")
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == {"dtype": "float32"}


def test_large_weights_come_in_bounded_shards(alone: Parallel, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(5)} | {"half": torch.ones(3, dtype=torch.bfloat16)}
    save_hf(target, source, Held(tensors), alone, "float32", shard_bytes=32)
    files = sorted(target.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 16 + 6
    for file in files:
        for name, tensor in load_file(file).items():
            assert index["weight_map"].pop(name) == file.name
            assert tensor.equal(tensors[name])
    assert not index["weight_map"]


def test_full_disk_leaves_no_folder_under_the_final_name(alone: Parallel, tmp_path: Path, monkeypatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(WeightsError, match=r"cannot be written: .*No space left"):
        save_hf(tmp_path / "target", source, Held({"a": torch.zeros(1)}), alone, "float32")
    assert not (tmp_path / "target").exists()
