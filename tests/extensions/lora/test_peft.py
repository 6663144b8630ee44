"""PEFT folders: PEFT computes the same with a written one, its own are read, and the rest is refused by name."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.errors import AsyncRLError, ConfigError, WeightsError
from asyncrl.extensions.lora.peft import read_peft, write_peft
from asyncrl.extensions.lora.peft_config import check_start, parsed, read_adapter_config, user_config
from asyncrl.schema import POLICY
from tests.weights.adapters import adapters, loaded, logits, lora, merged
from tests.weights.models import written

FAMILIES = [
    "llama",
    "qwen3-moe",
    "qwen3-moe-dense-layer",
    "mixtral",
    "glm4-moe",
    "deepseek-v3",
    "gpt_oss",
    "hy_v3",
    "olmo2",
    "olmo3",
]


def saved(model: Path, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    write_peft(folder, user_config(lora(**settings), tensors, str(model)), tensors.items())
    return folder


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_as_merged_weights_do(family: str, rslora: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    model = written(tmp_path / "hf", family)
    tensors = adapters(model)
    folder = saved(model, tmp_path / "peft", tensors, rslora=rslora)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(loaded(model), folder)
    assert not [one for one in said if "adapter keys" in str(one.message)]
    expected = loaded(merged(model, tmp_path / "merged", tensors, lora(rslora=rslora).scale))
    assert (logits(expected) - logits(loaded(model))).abs().max() > 0.01
    # A norm after a block enlarges what rounding leaves of small values.
    torch.testing.assert_close(logits(adapted), logits(expected), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_written_folder_is_read_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = written(tmp_path / "hf", family)
    tensors = adapters(model)
    folder = saved(model, tmp_path / "peft", tensors, rslora=True)
    back = read_peft(folder)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert read_adapter_config(folder).scale == 10 / math.sqrt(4)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path / "hf", "llama")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("a_field_of_the_future", {"mode": 1}),
        ("init_lora_weights", "pissa_niter_4"),
        ("peft_type", "ADALORA"),
        ("r", 0),
        ("r", "16"),
        ("lora_alpha", None),
    ],
)
def test_unplain_lora_is_refused_with_a_remedy(llama: Path, field: str, value: Any) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {field}.*: got .*\. \w.*\."):
        read_peft(folder)


def test_a_pickle_is_not_read(llama: Path) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match=r"adapter_model\.bin is a pickle.*safe_serialization=True"):
        read_peft(folder)


@pytest.mark.parametrize("damage", ["rank", "flat", "lonely", "embedding", "truncated", "config", "no config"])
def test_damage_is_named(llama: Path, damage: str) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama))
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    name = min(tensors)
    match damage:
        case "rank":
            tensors[name] = tensors[name][:3]
        case "flat":
            tensors[name] = tensors[name].flatten()
        case "lonely":
            del tensors[name]
        case "embedding":
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 97)
        case "config":
            config.write_text("[]")
        case "no config":
            config.unlink()
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(AsyncRLError) as raised:
        read_peft(folder)
    shown = {"embedding": "embed_tokens", "truncated": file.name, "config": config.name, "no config": config.name}
    assert shown.get(damage, parsed(name)[0]) in str(raised.value)


def test_a_folder_is_replaced_as_a_whole(llama: Path) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama, only="q_proj"))
    (folder / "of an older export").touch()
    saved(llama, folder, adapters(llama, only="v_proj"))
    assert {module.rpartition(".")[2] for module, _ in map(parsed, read_peft(folder))} == {"v_proj"}
    assert sorted(file.name for file in llama.parent.iterdir()) == ["hf", "peft"]
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"rank": 8}, "rank", "have rank 4: set that"),
        ({"alpha": 5.0}, "alpha", "have the scale 2.5: set 10"),
        ({"rslora": True}, "alpha", "have the scale 2.5: set 5"),
        ({"targets": ["q_proj"]}, "targets", r"has adapters of \['o_proj', 'q_proj'\]"),
        ({"targets": ["q_proj", "o_proj", "v_proj"]}, "targets", "has adapters of"),
        ({"rank": None}, "path", "Set trainer.lora.rank"),
        ({"path": "nowhere"}, "path", "no folder nowhere"),
    ],
)
def test_run_starts_only_from_adapters_of_its_settings(
    llama: Path, settings: dict[str, Any], field: str, remedy: str
) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama, only="[oq]_proj"))
    check_start(lora(path=str(folder)), [POLICY])
    check_start(lora(path=str(folder), targets=["q_proj", "o_proj"]), [POLICY])
    check_start(lora(path=str(folder), alpha=5.0, rslora=True), [POLICY])  # the same scale
    with pytest.raises(ConfigError, match=rf"trainer\.lora\.path: got .*no folder {folder.parent}/solver"):
        check_start(lora(path=str(folder.parent)), ["peft", "solver"])
    with pytest.raises(ConfigError, match=rf"trainer\.lora\.{field}: got .*{remedy}"):
        check_start(lora(**{"path": str(folder), **settings}), [POLICY])


def test_a_run_does_not_start_from_adapters_of_several_ranks(llama: Path) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama, only="[oq]_proj"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": {"q_proj": 3}}))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.path: got .* several ranks and scales, \{'q_proj': 3\}"):
        check_start(lora(path=str(folder)), [POLICY])


def test_what_a_run_cannot_read_is_refused_before_it_starts(llama: Path) -> None:
    folder = saved(llama, llama.parent / "peft", adapters(llama))
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not a linear layer"):
        check_start(lora(path=str(folder)), [POLICY])
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match="is a pickle"):
        check_start(lora(path=str(folder)), [POLICY])
