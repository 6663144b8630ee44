"""A conversion that cannot be made leaves nothing (or what was there before), and one line says why."""

from __future__ import annotations

import io
import os
import pickle
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.extensions.convert.cli import main
from asyncrl.models.families import known_families, of_type
from tests.extensions.convert.models import changed, converted, described, refused, rewritten
from tests.weights.models import written


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.1.self_attn.o_proj.weight", None, "is missing"),
        ("model.layers.0.post_attention_layernorm.weight", None, "is missing"),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(32), "has no place for"),
        ("model.layers.1.self_attn.k_proj.weight", torch.ones(24, 32), "do not fit config.json"),
        ("model.embed_tokens.weight", torch.ones(98, 32), "do not fit config.json"),
        ("model.layers.2.mlp.down_proj.weight", torch.ones(32, 44, dtype=torch.bfloat16), "has the stacked shape"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(
    llama: Path, capsys: pytest.CaptureFixture[str], name: str, tensor: Tensor | None, said: str
) -> None:
    changed(llama, **{name: tensor})
    line = refused(capsys, 1, ["to-megatron", str(llama), str(llama.with_name("out"))])
    layer = re.search(r"\d", name)
    assert said in line
    assert name in line or (layer is not None and f"layers.{layer[0]}.mlp.linear_fc2.weight" in line)


def test_a_config_that_cannot_be_used_is_named(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["to-megatron", str(llama), str(llama.with_name("out"))]
    rewritten(llama, architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in refused(capsys, 1, arguments)
    rewritten(llama, architectures=["MixtralForCausalLM"])
    assert "num_experts" in refused(capsys, 1, arguments)
    (llama / "config.json").write_text("{")
    assert "config.json" in refused(capsys, 1, arguments)
    (llama / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "num_hidden_layers" in refused(capsys, 1, arguments)
    (llama / "config.json").unlink()
    assert "config.json" in refused(capsys, 1, arguments)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    between, back = converted(llama)
    shutil.rmtree(back)
    arguments = ["to-hf", str(between), str(back)]
    whole = (between / "hf" / "config.json").read_text()
    for fields, said in (
        ({"num_hidden_layers": 2}, "stacks (3,) tensors, but config.json requires (2,)"),
        ({"tie_word_embeddings": True}, "no place for: output_layer.weight"),
        ({"vocab_size": 98}, "embedding.word_embeddings.weight"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "decoder.layers.0.self_attention.q_layernorm.weight is missing"),
        ({"num_key_value_heads": 3}, "linear_qkv.weight of shape"),
    ):
        rewritten(between / "hf", **fields)
        assert said in refused(capsys, 1, arguments), fields
        (between / "hf" / "config.json").write_text(whole)


def test_a_damaged_checkpoint_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    between, back = converted(llama)
    shutil.rmtree(back)
    arguments = ["to-hf", str(between), str(back)]
    data = between / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refused(capsys, 1, arguments)
    data.unlink()
    assert "__0_0.distcp" in refused(capsys, 1, arguments)
    data.write_bytes(content)
    saved = (between / ".metadata").read_bytes()
    metadata = pickle.loads(saved)
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    (between / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "decoder.layers.mlp.linear_fc2.weight at (2,)" in refused(capsys, 1, arguments)
    (between / ".metadata").write_bytes(saved[:-20])
    assert ".metadata is damaged" in refused(capsys, 1, arguments)
    (between / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    assert "fsdp_dtensor" in refused(capsys, 1, arguments)
    (between / "metadata.json").unlink()
    assert "is not a Megatron checkpoint" in refused(capsys, 1, arguments)


class Run:
    """Pickle that would run code in its reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("place", ["index", "chunk"])
def test_a_strangers_checkpoint_runs_nothing(
    place: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    between, back = converted(llama)
    shutil.rmtree(back)
    evil = Run(tmp_path / "mark")
    if place == "index":
        (between / ".metadata").write_bytes(pickle.dumps(evil))
    else:
        buffer = io.BytesIO()
        torch.save(evil, buffer)
        metadata = pickle.loads((between / ".metadata").read_bytes())
        for index, where in metadata.storage_data.items():
            metadata.storage_data[index] = replace(where, offset=0, length=len(buffer.getvalue()))
        (between / ".metadata").write_bytes(pickle.dumps(metadata))
        (between / "__0_0.distcp").write_bytes(buffer.getvalue())
    said = refused(capsys, 1, ["to-hf", str(between), str(back)])
    assert ".metadata is damaged" in said if place == "index" else "cannot be read" in said
    assert not (tmp_path / "mark").exists()


def test_wrong_arguments_are_refused_with_exit_code_2(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = llama.with_name("taken")
    taken.mkdir()
    (taken / "letters.txt").write_text("dear")
    for arguments, said in (
        (["to-megatron", str(llama / "none"), str(llama.with_name("out"))], "not a folder"),
        (["to-megatron", str(llama), str(taken)], "--overwrite"),
        (["to-megatron", str(llama), str(taken), "--overwrite"], "not a converted folder"),
        (["to-megatron", str(llama), str(llama), "--overwrite"], "outside of"),
        (["to-megatron", str(llama), str(llama.parent), "--overwrite"], "outside of"),
        (["to-hf", str(llama), str(llama / "inside"), "--overwrite"], "outside of"),
    ):
        assert said in refused(capsys, 2, arguments)
    assert (taken / "letters.txt").read_text() == "dear"
    for wrong in (
        ["to-hf"],
        ["to-tf", "a", "b"],
        ["to-hf", "a", "b", "--shard-gb", "0"],
        ["to-hf", "a", "b", "--dtype", "int8"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2


@contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """A disk that takes no more: writes beyond fail as on a full one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_disk_that_fills_up_leaves_the_folder_that_was_there(
    llama: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    between, back = converted(llama)
    source, out = {"to-megatron": (llama, between), "to-hf": (between, back)}[direction]
    source = source.rename(source.with_name("source"))
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with files_at_most(20_000):
        line = refused(capsys, 1, [direction, str(source), str(out), "--overwrite"])
    assert "large" in line or "written" in line
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("target", ["secret", "folder", "/dev/zero"])
def test_a_link_out_of_the_folder_is_not_followed(
    llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "folder").mkdir()
    (llama / "notes.txt").symlink_to(tmp_path / target)
    line = refused(capsys, 1, ["to-megatron", str(llama), str(llama.with_name("out"))])
    assert f"notes.txt is a link to {tmp_path / target}: put the file itself there" in line


def test_links_into_the_hub_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0a"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    shutil.move(llama, snapshot)
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert main(["to-megatron", str(snapshot), str(tmp_path / "out")]) == 0


def test_too_small_disk_is_told_before_writing(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(llama)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert "GB left" in refused(capsys, 1, ["to-megatron", str(llama), str(llama.with_name("out"))])


def test_failed_rename_leaves_the_old_folder_its_name(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    between, _ = converted(llama)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise PermissionError(f"{target} is watched")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    assert "is watched" in refused(capsys, 1, ["to-megatron", str(llama), str(between), "--overwrite"])
    assert (between / ".metadata").is_file()


def test_conversion_killed_between_renames_costs_nothing(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    between, back = converted(llama)
    expected = described(back)
    back.rename(back.with_name("back.replaced"))
    (between / "__0_0.distcp").unlink()
    assert main(["to-hf", str(between), str(back)]) == 1
    assert "__0_0.distcp" in capsys.readouterr().err
    assert described(back) == expected


def test_leftovers_of_a_killed_conversion_do_not_matter(llama: Path) -> None:
    for ending in (".partial", ".replaced"):
        (llama.with_name(f"megatron{ending}") / "hf").mkdir(parents=True)
    between, back = converted(llama)
    assert sorted(folder.name for folder in llama.parent.iterdir()) == ["back", "hf", "megatron"]
    assert described(back) == described(llama)
    assert not list(between.glob("*.partial"))


def test_progress_names_each_file_with_its_size(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-megatron", str(llama), str(llama.with_name("m"))]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"asyncrl-convert: __0_0\.distcp  0\.\d+ GB  \d+\.\d s  \d+\.\d+ GB/s\n", said.err)


@pytest.mark.parametrize("kind", [family.model_type for family in known_families().values() if family.tower])
def test_a_model_that_sees_is_not_converted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_vision = pytest.importorskip("asyncrl.extensions.vision.tiny")

    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    tiny_vision.write(tmp_path / "model", kind)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    for arguments in (["to-megatron", model, out], ["from-peft", str(tmp_path / "adapter"), out, "--model", model]):
        told = refused(capsys, 1, arguments)
        assert f"{of_type(kind).architecture} cannot be converted: checkpoints do not hold a frozen vision" in told
        assert "Let a run write the HF folder (trainer.save_hf_every), or merge its PEFT folder" in told


def test_a_stack_of_other_experts_than_config_says_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path / "hf", "gpt_oss")
    rewritten(model, num_local_experts=3)
    said = refused(capsys, 1, ["to-megatron", str(model), str(tmp_path / "out")])
    assert "model.layers.0.mlp.experts.gate_up_proj stacks 4 experts, but config.json requires 3" in said
