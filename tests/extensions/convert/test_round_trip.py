"""A model goes into a Megatron checkpoint and comes back byte for byte."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from asyncrl.extensions.convert.checkpoint import CheckpointReader, CheckpointWriter
from asyncrl.extensions.convert.cli import main
from asyncrl.extensions.convert.parameters import Address, Parameter, Structure
from asyncrl.models.tiny import write_random_model
from tests.extensions.convert.models import add_drafts, converted, described, rewritten
from tests.weights.models import tensors, written


def test_every_tensor_and_companion_comes_back_byte_for_byte(model: Path) -> None:
    _, back = converted(model)
    assert described(back) == described(model)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "templates/tool.jinja"):
        assert (back / name).read_bytes() == (model / name).read_bytes()
    assert (back / "model.safetensors.index.json").is_file()
    assert not (back / "model.safetensors").exists()


@pytest.mark.parametrize("limit", [1, 3_000, 20_000])
def test_files_keep_their_limit_and_the_index_names_all_once(llama: Path, limit: int) -> None:
    between, back = converted(llama, "--shard-gb", str(limit / 1e9))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    seen = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            assert opened.metadata() == {"format": "pt"}
        seen.update(dict.fromkeys(names, file.name))
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0  # the tensors begin at a multiple of 8
        nbytes = sum(tensor.nbytes for tensor in load_file(file).values())
        assert nbytes <= limit or len(names) == 1
    assert index["weight_map"] == seen
    assert seen.keys() == tensors(llama).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(llama).values())
    chunks = FileSystemReader(between).read_metadata().storage_data
    of_file: dict[str, list[int]] = {}
    for place in chunks.values():
        of_file.setdefault(place.relative_path, []).append(place.length)
    slack = 4096  # torch.save's own words around a tensor
    assert all(sum(set(sizes)) <= max(limit, max(sizes)) + slack * len(sizes) for sizes in of_file.values())
    assert len(of_file) > 1


def test_cast_leaves_what_chooses_experts_and_says_so(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", "glm4-moe")
    rewritten(source, torch_dtype="bfloat16")  # the field's name before transformers 5
    between, back = converted(source, "--dtype", "float32")
    before, after = tensors(source), tensors(back)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    for name, tensor in before.items():
        assert after[name].equal(tensor.float()), name
    hf = json.loads((back / "config.json").read_text())
    assert hf["dtype"] == "float32"
    assert "torch_dtype" not in hf
    assert json.loads((between / "hf" / "config.json").read_text())["dtype"] == "float32"
    assert main(["to-hf", str(between), str(tmp_path / "half"), "--dtype", "float16"]) == 0
    halves = tensors(tmp_path / "half")
    biases = {name for name in halves if name.endswith("e_score_correction_bias")}
    assert biases
    assert biases == {name for name, tensor in halves.items() if tensor.dtype != torch.float16}


def test_mixed_precision_is_laid_out_without_holes(tmp_path: Path) -> None:
    """float32 biases of routers between bfloat16 matrices: the wider dtypes come first in each file."""
    source = written(tmp_path / "hf", "deepseek-v3")
    _, back = converted(source, "--shard-gb", "1e-5")
    assert {tensor.dtype for tensor in tensors(back).values()} == {torch.float32, torch.bfloat16}
    assert described(back) == described(source)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_multi_token_layers_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    source = written(tmp_path / "hf", name)
    add_drafts(source)
    between, back = converted(source)
    before = described(source)
    del before["model.layers.3.embed_tokens.weight"]  # a copy
    assert described(back) == before
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1
    keys = CheckpointReader(between).model_keys
    own = {key.removeprefix("mtp.layers.0.") for key in keys if key.startswith("mtp.")}
    assert {"eh_proj.weight", "final_layernorm.weight", "transformer_layer.mlp.router.weight"} <= own


def test_layers_that_config_does_not_name_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "hf", "deepseek-v3")
    further = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.mlp.gate.weight": torch.ones(2)}
    save_file(further, source / "further.safetensors")
    rewritten(source, num_nextn_predict_layers=0)
    _, back = converted(source)
    said = capsys.readouterr().err
    assert all(name in said for name in further)
    assert tensors(back).keys() == tensors(source).keys() - further.keys()


def test_fp8_folder_becomes_bfloat16_with_its_config(tmp_path: Path) -> None:
    source, out = written(tmp_path / "hf", "deepseek-v3"), tmp_path / "plain"
    plain, name = tensors(source), "model.layers.0.mlp.gate_proj.weight"
    codes = {name: plain[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), 2.0)}
    save_file({**plain, **codes}, source / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rewritten(source, quantization_config=fp8, a_field="of the publisher's code")
    before = json.loads((source / "config.json").read_text())
    assert main(["dequantize", str(source), str(out)]) == 0
    found = tensors(out)
    assert found.keys() == plain.keys()
    assert found.pop(name).equal((codes[name].float() * 2).bfloat16())
    assert all(tensor.equal(plain[other]) for other, tensor in found.items())
    del before["quantization_config"]
    assert json.loads((out / "config.json").read_text()) == {**before, "dtype": "bfloat16"}
    _, back = converted(source)  # to a checkpoint of Megatron, too
    assert tensors(back)[name].equal((codes[name].float() * 2).bfloat16())
    assert json.loads((back / "config.json").read_text()) == before


def test_a_tied_models_second_embedding_is_not_stored(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", "llama-tied")
    save_file({"lm_head.weight": tensors(source)["model.embed_tokens.weight"]}, source / "head.safetensors")
    between, back = converted(source)
    assert "output_layer.weight" not in CheckpointReader(between).model_keys
    assert "lm_head.weight" not in tensors(back)


def test_a_model_is_tied_that_is_so_by_its_familys_default(tmp_path: Path) -> None:
    """Gemma-3's publisher does not say it in config.json, which stays as it is."""
    source = written(tmp_path / "hf", "gemma3_text")
    hf = json.loads((source / "config.json").read_text())
    del hf["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(hf))
    _, back = converted(source)
    assert described(back) == described(source)
    assert json.loads((back / "config.json").read_text()) == hf


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_memory_never_holds_more_than_a_few_parameters(tmp_path: Path, direction: str) -> None:
    source = tmp_path / "hf"
    sizes: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 4, "intermediate": 64, "tied": True}
    write_random_model(source, "llama", vocab=97, layers=24, seed=0, dtype="float32", **sizes)
    converted(source)
    arguments = {
        "to-megatron": [str(source), str(tmp_path / "m")],
        "to-hf": [str(source.with_name("megatron")), str(tmp_path / "h")],
    }
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        assert main([direction, *arguments[direction]]) == 0
    mapped = (source / "model.safetensors").stat().st_size  # the file, which is not read into memory
    found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in found if abs(event.nbytes()) != mapped]
    events.sort(key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in events))
    largest = 3 * 64 * 64 * 4  # queries, keys and values
    assert sum(tensor.nbytes for tensor in tensors(source).values()) > 40 * largest
    assert peak <= 4 * largest


# --- other checkpoints than our own -------------------------------------------------------------------------


class _Placed(Structure):
    """The same parameters at the places of another spec: those that are like `norm`, the key of a norm in it."""

    def __init__(self, hf: dict[str, Any], norm: str) -> None:
        super().__init__(hf)
        self._norm = norm

    def __iter__(self) -> Iterator[Parameter]:
        for parameter in super().__iter__():
            places = [place for place in parameter.addresses if self._alike(place.key)]
            yield Parameter(parameter.name, parameter.found, tuple(places or parameter.addresses))

    def _alike(self, key: str) -> bool:
        numbered = re.search(r"layers\.\d", key) is None, re.search(r"layers\.\d", self._norm) is None
        is_norm = key.endswith(("layer_norm_weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"))
        fused = "layer_norm_weight" in key, "layer_norm_weight" in self._norm
        return numbered[0] == numbered[1] and (not is_norm or fused[0] == fused[1])


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("qwen3", "decoder.layers.input_layernorm.weight"),
        ("qwen3", "decoder.layers.2.input_layernorm.weight"),
        ("qwen3", "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"),
        ("qwen3-moe", "decoder.layers.pre_mlp_layernorm.weight"),
        ("qwen3-moe", "decoder.layers.mlp.linear_fc1.layer_norm_weight"),
        ("qwen3-moe", "decoder.layers.2.pre_mlp_layernorm.weight"),
        ("deepseek-v3", "decoder.layers.2.mlp.linear_fc1.layer_norm_weight"),
    ],
)
def test_stacked_and_single_layers_and_norms_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, norm: str
) -> None:
    source = written(tmp_path / "hf", name)
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.extensions.convert.bridge.Structure", lambda hf: _Placed(hf, norm))
        assert main(["to-megatron", str(source), str(tmp_path / "m")]) == 0
    assert norm in CheckpointReader(tmp_path / "m").model_keys
    assert main(["to-hf", str(tmp_path / "m"), str(tmp_path / "back")]) == 0
    assert described(tmp_path / "back") == described(source)


def test_chunks_of_other_tensor_parallel_degrees_are_read(llama: Path) -> None:
    """Megatron saves like this at TP=2: rows in two chunks, a padded vocabulary, and optimizer tensors."""
    between, back = converted(llama)
    expected = described(back)
    hf = json.loads((llama / "config.json").read_text())
    source, parts = CheckpointReader(between), between.with_name("parts")
    parts.mkdir()
    with CheckpointWriter(parts, 10**9, lambda file, size: None) as writer:
        for parameter in Structure(hf):
            whole = source.read(source.locate(parameter))
            if len(whole) == hf["vocab_size"]:
                whole = torch.cat([whole, whole.new_zeros(31, *whole.shape[1:])])
            writer.add(parameter, whole)
        extra = Address("optimizer.state.exp_avg.embedding.word_embeddings.weight", (), ())
        writer.add(Parameter(extra.key, next(iter(Structure(hf))).found, (extra,)), torch.ones(3))
        writer.finish()
    halved(parts)
    assert main(["to-hf", str(parts), str(back), "--overwrite", "--model", str(llama)]) == 0
    assert described(back) == expected


def halved(folder: Path) -> None:
    """Every chunk again in two halves along its last axis, as two files' worth of other ranks."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    places = {}
    with (folder / "__1_0.distcp").open("wb") as file:
        for index, place in metadata.storage_data.items():
            entry = metadata.state_dict_metadata[index.fqn]
            if not hasattr(entry, "chunks"):
                places[index] = place
                continue
            with (folder / place.relative_path).open("rb") as saved:
                saved.seek(place.offset)
                tensor = torch.load(io.BytesIO(saved.read(place.length)), weights_only=True)
            at = next(n for n, chunk in enumerate(entry.chunks) if chunk.offsets == index.offset)
            chunk = entry.chunks.pop(at)
            for half, start in ((tensor[..., :1], 0), (tensor[..., 1:], 1)):
                offsets = torch.Size((*chunk.offsets[:-1], chunk.offsets[-1] + start))
                entry.chunks.append(type(chunk)(offsets, half.shape))
                begin = file.tell()
                torch.save(half.clone(), file)
                places[type(index)(index.fqn, offsets)] = type(place)(
                    file.name.split("/")[-1], begin, file.tell() - begin
                )
    metadata.storage_data = places
    (folder / "__0_0.distcp").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_view_is_stored_without_the_memory_around_it(tmp_path: Path) -> None:
    around = torch.arange(10**6, dtype=torch.float32).view(1000, 1000)
    hf = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 1}
    parameter = next(iter(Structure(hf)))
    with CheckpointWriter(tmp_path, 10**9, lambda file, size: None) as writer:
        writer.add(parameter, around[:8, ::50])
        writer.finish()
    assert (tmp_path / "__0_0.distcp").stat().st_size < 10_000
    assert CheckpointReader(tmp_path).read(parameter.addresses[0]).equal(around[:8, ::50])
