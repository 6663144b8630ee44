"""Adapters go into weights as in PEFT, and into checkpoints and back bit for bit; those of other models are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.errors import AsyncRLError, WeightsError
from asyncrl.extensions.convert.adapters import PeftFolder
from asyncrl.extensions.convert.cli import main
from asyncrl.extensions.lora.peft import write_peft
from asyncrl.extensions.lora.peft_config import parsed, user_config
from asyncrl.models.families import of_type
from asyncrl.weights.folder import HFFolder
from tests.extensions.convert.models import changed, described, refused, rewritten
from tests.fakes import tiny_config
from tests.weights.adapters import RANK, adapters, loaded, logits, lora, merged
from tests.weights.models import MODELS, as_published, tensors, written

ADAPTED = [name for name, (kind, *_) in MODELS.items() if of_type(kind).adapters]


def adapter_of(model: Path, only: str = "", **settings: object) -> Path:
    """A PEFT folder beside the model."""
    folder, found = model.with_name("adapter"), adapters(model, only=only)
    write_peft(folder, user_config(lora(**settings), found, str(model)), found.items())
    return folder


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "deepseek-v3", "gpt_oss", "hy_v3"])
def test_merged_weights_compute_what_peft_computes(family: str, tmp_path: Path) -> None:
    from peft import PeftModel  # here, since its import takes seconds, and every process of the tests reads this file

    model, out = written(tmp_path / "hf", family), tmp_path / "merged"
    changed(model, **{name: tensor.float() for name, tensor in tensors(model).items()})
    adapter = adapter_of(model, only="(k|o|a|gate_up|down)_proj", rslora=True)
    assert main(["merge", str(model), str(adapter), str(out), "--shard-gb", "0.00002"]) == 0
    expected = logits(PeftModel.from_pretrained(loaded(model), adapter))
    assert (expected - logits(loaded(model))).abs().max() > 0.01
    torch.testing.assert_close(logits(loaded(out)), expected, atol=2e-5, rtol=0)
    before, after = described(model), described(out)
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} & before.keys() <= same
    assert {"model.layers.1.self_attn.o_proj.weight"} <= before.keys() - same
    assert len(list(out.glob("*.safetensors"))) > 3
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rank_pattern": {r"layers\.0\..*q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
        ("llama", {"use_rslora": True, "target_modules": "all-linear"}),
        ("qwen3-moe", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj"]}),
        ("qwen3-moe", {"target_parameters": ["experts.down_proj"]}),
        ("gpt_oss", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ],
)
def test_a_folder_of_peft_is_read_as_peft_computes_it(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = written(tmp_path / "hf", family)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings})
    adapted = get_peft_model(loaded(model), config).eval()
    adapted.save_pretrained(tmp_path / "peft")
    opened = PeftFolder(tmp_path / "peft")
    scaled = {n: t * opened.scale_of(parsed(n)[0]) if "lora_B" in n else t for n, t in opened.tensors.items()}
    expected = loaded(merged(model, tmp_path / "merged", scaled, 1.0))
    torch.testing.assert_close(logits(adapted), logits(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("rank_pattern", {"q_proj": -1}, "rank_pattern.*: got -1"),
        ("alpha_pattern", {"q_(proj": 2}, "alpha_pattern: got 'q_.proj'"),
        ("r", 3, "has rank 4, but adapter_config.json says 3"),
    ],
)
def test_ranks_and_scales_that_are_wrong_are_named(llama: Path, field: str, value: Any, shown: str) -> None:
    file = adapter_of(llama) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(AsyncRLError, match=shown):
        PeftFolder(file.parent)


def test_a_pattern_that_backtracks_forever_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.extensions.convert.adapters.MATCH_SECONDS", 0.1)
    file = adapter_of(llama) / "adapter_config.json"
    patterns = {"q_proj": 4, "(a|aa)+_": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rank_pattern": patterns}))
    opened = PeftFolder(file.parent)
    assert opened.rank_of("model.layers.0.self_attn.q_proj") == 4
    with pytest.raises(WeightsError, match=r"the pattern '\(a\|aa\)\+_' was not matched with a{60} within 0\.1 s"):
        opened.rank_of("a" * 60)


def test_stacked_adapters_of_a_model_that_sees_are_merged(tmp_path: Path) -> None:
    """Those of Qwen3-VL-MoE, whose vision tower keeps its bytes."""
    from peft import PeftModel

    tiny_vision = pytest.importorskip("asyncrl.extensions.vision.tiny")
    model, out = tmp_path / "hf", tmp_path / "merged"
    tiny_vision.write(model, "qwen3_vl_moe", spread=0.15)
    as_published(model, "qwen3_vl_moe")
    adapter = adapter_of(model, only="(q|o|gate_up|down)_proj")
    assert main(["merge", str(model), str(adapter), str(out)]) == 0

    def computed(folder: Path, *adapters: Path) -> torch.Tensor:
        sees = AutoModelForImageTextToText.from_pretrained(folder, experts_implementation="eager").eval()
        for one in adapters:
            sees = PeftModel.from_pretrained(sees, one)
        return logits(sees)

    assert (computed(out) - computed(model)).abs().max() > 0.01
    torch.testing.assert_close(computed(out), computed(model, adapter), atol=2e-5, rtol=0)
    before, after = described(model), described(out)
    assert before.keys() == after.keys()
    changed_names = {name for name in before if before[name] != after[name]}
    ends = {name.rpartition("layers.")[2].partition(".")[2] for name in changed_names}
    of_experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert ends == of_experts | {"self_attn.q_proj.weight", "self_attn.o_proj.weight"}
    assert len(changed_names) == 4 * 2


def test_merged_weights_keep_their_dtype(llama: Path) -> None:
    out = llama.with_name("merged")
    assert main(["merge", str(llama), str(adapter_of(llama)), str(out)]) == 0
    assert {tensor.dtype for tensor in tensors(out).values()} == {torch.bfloat16}
    assert (out / "config.json").read_bytes() == (llama / "config.json").read_bytes()


def test_experts_of_old_adapters_are_merged(tmp_path: Path) -> None:
    model, out = written(tmp_path / "hf", "qwen3-moe"), tmp_path / "merged"
    adapter = adapter_of(model, only="q_proj")
    file, name = adapter / "adapter_model.safetensors", "model.layers.1.mlp.experts.3.up_proj"
    weight = tensors(model)[f"{name}.weight"].float()
    a, b = torch.randn(RANK, weight.shape[1]), torch.randn(len(weight), RANK)
    prefix = f"base_model.model.{name}.lora_"
    save_file({**load_file(file), f"{prefix}A.weight": a, f"{prefix}B.weight": b}, file)
    assert main(["merge", str(model), str(adapter), str(out)]) == 0
    torch.testing.assert_close(tensors(out)[f"{name}.weight"], (weight + lora().scale * b @ a).bfloat16())


@pytest.mark.parametrize("trouble", ["name", "shape", "tied", "quantized", "missing", "dora"])
def test_what_cannot_be_merged_is_named(trouble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path / "hf", "llama-tied")
    adapter, name, code = adapter_of(model), "model.layers.2.self_attn.o_proj", 1
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    held = load_file(file)
    match trouble:
        case "name":
            name = "model.layers.3.self_attn.o_proj"
            held |= {n.replace("layers.2.self_attn.o", "layers.3.self_attn.o"): t.clone() for n, t in held.items()}
        case "shape":
            held[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(RANK, 31)
        case "tied":
            name = "lm_head"
            held |= {"lm_head.lora_A.weight": torch.zeros(RANK, 32), "lm_head.lora_B.weight": torch.zeros(97, RANK)}
        case "quantized":
            rewritten(model, quantization_config={"quant_method": "fp8"})
            name = "quantized"
        case "dora":
            config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
            name, code = "use_dora", 2
    save_file(held, file)
    if trouble == "missing":
        adapter, name, code = tmp_path / "nowhere", "nowhere", 2
    assert name in refused(capsys, code, ["merge", str(model), str(adapter), str(tmp_path / "out")])


@pytest.mark.parametrize("family", ADAPTED)
def test_a_peft_folder_comes_back_from_a_checkpoint_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = written(tmp_path / "hf", family)
    adapter, between, back = adapter_of(model), tmp_path / "megatron", tmp_path / "back"
    assert main(["from-peft", str(adapter), str(between), "--model", str(model), "--shard-gb", "0.00001"]) == 0
    assert len(list(between.glob("*.distcp"))) > 1
    assert main(["to-peft", str(between), str(back)]) == 0
    assert described(back) == described(adapter)
    assert json.loads((back / "adapter_config.json").read_text()) == json.loads(
        (adapter / "adapter_config.json").read_text()
    )


@pytest.mark.parametrize("trouble", ["layer", "head", "other model", "all weights"])
def test_a_folder_that_is_not_of_the_model_becomes_no_checkpoint(
    trouble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path / "hf", "llama")
    adapter, name = adapter_of(model), "model.layers.2.self_attn.o_proj"
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    arguments = ["from-peft", str(adapter), str(tmp_path / "out"), "--model", str(model)]
    match trouble:
        case "layer":
            held = {n: t for n, t in held.items() if name not in n}
        case "head":
            name = "lm_head"
            held |= {"lm_head.lora_A.weight": torch.zeros(RANK, 32), "lm_head.lora_B.weight": torch.zeros(97, RANK)}
        case "other model":
            held = {n.replace("self_attn.o_proj", "self_attn.dense"): t for n, t in held.items()}
            name = "self_attn.dense"
        case "all weights":
            name = "use to-hf"
            assert main(["to-megatron", str(model), str(tmp_path / "megatron")]) == 0
            arguments = ["to-peft", str(tmp_path / "megatron"), str(tmp_path / "out"), "--model", str(model)]
            (tmp_path / "megatron/hf/adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    save_file(held, file)
    assert name in refused(capsys, 1, arguments)


def checkpoint_of(model: Path, folder: Path, **settings: object) -> Path:
    """A checkpoint as a run with adapters writes it."""
    assert main(["from-peft", str(adapter_of(model)), str(folder / "policy"), "--model", str(model)]) == 0
    shutil.rmtree(folder / "policy/hf")
    changes = {f"trainer.lora.{name}": value for name, value in lora(**settings).model_dump().items()}
    config = json.loads(tiny_config(**{"model.path": str(model), **changes}).model_dump_json())
    with HFFolder(model) as base:
        manifest.commit(folder, Manifest(manifest.FORMAT, 4, "run", 0.0, config, {}, base.digest()))
    return folder


def test_adapters_of_a_run_become_a_peft_folder(llama: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(llama, tmp_path / "00000004", rslora=True)
    for source in (checkpoint, checkpoint / "policy"):
        assert main(["to-peft", str(source), str(tmp_path / "peft"), "--overwrite"]) == 0
    assert described(tmp_path / "peft") == described(adapter_of(llama))
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["use_rslora"], config["base_model_name_or_path"]) == (True, str(llama))
    assert main(["to-hf", str(checkpoint), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    expected = load_file(merged(llama, tmp_path / "expected", adapters(llama), 10 / RANK**0.5) / "model.safetensors")
    for name, tensor in tensors(tmp_path / "out").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


def test_all_weights_of_a_runs_checkpoint_need_only_its_folder(llama: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "00000004"
    assert main(["to-megatron", str(llama), str(checkpoint / "policy")]) == 0
    shutil.rmtree(checkpoint / "policy/hf")
    config = json.loads(tiny_config(**{"model.path": str(llama)}).model_dump_json())
    manifest.commit(checkpoint, Manifest(manifest.FORMAT, 4, "run", 0.0, config, {}, None))
    for source in (checkpoint, checkpoint / "policy"):
        assert main(["to-hf", str(source), str(tmp_path / "out"), "--overwrite"]) == 0
        assert tensors(tmp_path / "out").keys() == tensors(llama).keys()


@pytest.mark.parametrize("trouble", ["other base", "quantized base", "no manifest"])
def test_weights_are_made_of_the_base_of_the_run_alone(
    trouble: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if trouble == "quantized base":
        pytest.importorskip("asyncrl.extensions.qlora")
    checkpoint = checkpoint_of(llama, tmp_path / "00000004", base="nf4" if trouble == "quantized base" else "none")
    said = {"other base": "with the hash", "quantized base": "base in nf4: use to-peft", "no manifest": "manifest.json"}
    if trouble == "other base":
        changed(llama, **{"model.norm.weight": tensors(llama)["model.norm.weight"] * 2})
    if trouble == "no manifest":
        (checkpoint / "manifest.json").unlink()
    assert said[trouble] in refused(capsys, 1, ["to-hf", str(checkpoint / "policy"), str(tmp_path / "out")])
