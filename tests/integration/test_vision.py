"""Log-probabilities and gradients of packs with images equal those of transformers in every layout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.models import tiny_vision
from asyncrl.weights.folder import HFFolder
from tests.fakes import changed, tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.vision import transformers_logprobs, vision_groups, weights

pytestmark = pytest.mark.integration

MODELS = {"tied": True, "untied": False}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
SMALL = {"micro_batch_tokens": 40}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({"recompute.granularity": "full", **SMALL}, list(MODELS)),
    "tp2": ({"tensor_parallel": 2}, list(MODELS)),
    "tp2-sp": (SEQUENCE, list(MODELS)),
    "pp2-vpp2": ({"pipeline_parallel": 2, "virtual_pipeline": 2, **SMALL}, ["untied"]),
    "tp2-sp-cp2": ({**SEQUENCE, "context_parallel": 2}, ["untied"]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "critic": {"algo.advantage": "gae", "trainer.micro_batch_tokens": 40, "algo.mini_batches": 2},
    "reference": {"algo.kl.coefficient": 0.1, "algo.epochs": 2, "algo.replay_groups": 1, "algo.entropy_bonus": 0.1},
    "sequences": {"algo.loss": "gspo", "algo.reset_every": 1, "trainer.share_prompts": False},
}
WORLD = {"single": 1, "tp2-sp-cp2": 4}
CASES = [(layout, model) for layout, (_, models) in LAYOUTS.items() for model in models]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models and a batch."""
    made = tmp_path_factory.mktemp("vision")
    for seed, (name, tied) in enumerate(MODELS.items()):
        tiny_vision.write_random(
            made / name, spread=0.15, seed=seed, num_hidden_layers=4, hidden_size=32, intermediate_size=48,
            tie_word_embeddings=tied, rope_parameters=ROPE,
        )  # fmt: skip
    (made / "groups.msgpack").write_bytes(msgspec.msgpack.encode(vision_groups()))
    return made


ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}


@cache
def expected(folder: Path, name: str) -> dict[str, Tensor]:
    """Return what transformers computes, by the names of rank_vision.py."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / name, dtype=torch.float32)
    logprobs = transformers_logprobs(model, folder / name, vision_groups())
    (weights(vision_groups()) * logprobs).sum().backward()
    for weight in model.parameters():  # transformers itself names its parameters in files
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    model.save_pretrained(folder / "gradients" / name)
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    return {"logprobs": logprobs.detach(), **{f"gradient {key}": tensor for key, tensor in gradients.items()}}


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        settings, models = LAYOUTS[layout]
        trainer = changed(tiny_values()["trainer"], settings)
        options = {name: tiny_values(**one) for name, one in OPTIONS.items()} if layout == "single" else {}
        settings = {"trainer": trainer, "models": models, "options": options}
        (folder / f"{layout}.json").write_text(json.dumps(settings))
        run_ranks("rank_vision.py", str(folder), layout, world=WORLD.get(layout, 2))

    return run


def test_a_saved_policy_has_its_vision_tower_from_the_folder_that_it_started_from(folder: Path, megatron: Any) -> None:
    megatron("single")
    given = load_file(folder / "tied" / "model.safetensors")
    with HFFolder(folder / "tied" / "saved") as saved:
        assert sorted(saved.names()) == sorted(given)
        for name, tensor in given.items():
            assert saved.read(name).equal(tensor) == name.startswith("visual."), name


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logprobs_and_gradients_are_those_of_transformers(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    found: dict[str, Tensor] = {}
    for file in folder.glob(f"{layout}-{name}-?.safetensors"):
        found |= load_file(file)
    rows, apart = found.pop("rows").tolist()
    assert rows < 0.8 * apart  # siblings share their images
    reference = expected(folder, name)
    for option in [key for key in found if key.startswith("started ")]:
        torch.testing.assert_close(found.pop(option), reference["logprobs"], rtol=0, atol=1e-5)
    text = {key for key in reference if not key.startswith("gradient visual.")}
    assert found.keys() == (text if "cp" not in layout else {"logprobs"})
    assert reference["logprobs"].std() > 0.3
    torch.testing.assert_close(found.pop("logprobs"), reference["logprobs"], rtol=0, atol=1e-5)
    for key, tensor in found.items():
        assert tensor.abs().max() > 1e-3, key
        torch.testing.assert_close(tensor, reference[key], rtol=0, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
