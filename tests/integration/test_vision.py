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

from asyncrl.extensions.vision import tiny as tiny_vision
from asyncrl.models.families import known_families
from asyncrl.weights.folder import HFFolder
from tests.fakes import reusing, tiny_config, tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.vision import transformers_logprobs, vision_groups, weights
from tests.weights.models import as_published

pytestmark = pytest.mark.integration

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"arch": "qwen2_5_vl", "tie_word_embeddings": True},
    "untied": {"arch": "qwen2_5_vl"},
    "deepstack": {
        "arch": "qwen3_vl",
        "rope_parameters": {**ROPE, "mrope_interleaved": True},
        "tie_word_embeddings": True,
    },
}
MODELS["experts"] = {
    **MODELS["deepstack"],
    "arch": "qwen3_vl_moe",
    "moe_intermediate_size": 24,  # else transformers could not tell transposed experts from others
    "tie_word_embeddings": False,
}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
TOWER_LR = 1e-5
SMALL = {"micro_batch_tokens": 40}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({"recompute.granularity": "full", **SMALL}, list(MODELS)),
    "tp2": ({"tensor_parallel": 2}, ["untied"]),
    "pp2": ({"pipeline_parallel": 2, **SMALL}, ["tied", "deepstack", "experts"]),
    "tp2-sp": (SEQUENCE, ["untied", "deepstack", "experts"]),
    "tp2-sp-ep2": ({**SEQUENCE, "expert_tensor_parallel": 1, "expert_parallel": 2}, ["experts"]),
    "pp2-vpp2": ({"pipeline_parallel": 2, "virtual_pipeline": 2, **SMALL}, ["untied"]),
    "tp2-sp-cp2": ({**SEQUENCE, "context_parallel": 2}, ["untied", "deepstack"]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "critic": {"algo.advantage": "gae", "trainer.micro_batch_tokens": 40, "algo.mini_batches": 2},
    "reference": {"algo.kl.coefficient": 0.1, "algo.epochs": 2, "algo.entropy_bonus": 0.1, **reusing(groups=1)},
    "sequences": {
        "algo.loss": "gspo",
        "algo.aggregation": "sequence",
        **reusing(reset_every=1),
        "trainer.share_prompts": False,
    },
    "tower": {"vision.tower": "trained", "vision.lr": TOWER_LR, "algo.kl.coefficient": 0.1},
    "adapters": {"trainer.lora.rank": 4, "trainer.optimizer.lr": 1e-2, "algo.kl.coefficient": 0.1},
}
WORLD = {"single": 1, "tp2-sp-cp2": 4}
CASES = [
    pytest.param(layout, model, marks=[pytest.mark.campaign] if layout in ("tp2", "pp2-vpp2") else [])
    for layout, (_, models) in LAYOUTS.items()
    for model in models
]


def test_every_family_that_sees_is_compared_here() -> None:
    assert {fields["arch"] for fields in MODELS.values()} == {
        one.model_type for one in known_families().values() if one.tower
    }


def towers(layout: str, name: str) -> list[str]:
    """Return how the vision tower is run: a trained one does not work with recomputed layers that add its features."""
    return ["frozen"] if layout == "single" and name in ("deepstack", "experts") else ["frozen", "trained"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models and a batch."""
    made = tmp_path_factory.mktemp("vision")
    for seed, (name, fields) in enumerate(MODELS.items()):
        tiny_vision.write(made / name, spread=0.15, seed=seed, **{"rope_parameters": ROPE, **SIZES, **fields})
        as_published(made / name, fields["arch"])
    (made / "groups.msgpack").write_bytes(msgspec.msgpack.encode(vision_groups()))
    return made


@cache
def expected(folder: Path, name: str) -> dict[str, Tensor]:
    """Return what transformers computes, by the names of ranks/vision.py."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32)
    logprobs = transformers_logprobs(model, folder / name, vision_groups())
    (weights(vision_groups()) * logprobs).sum().backward()
    for weight in model.parameters():  # transformers itself names its parameters in files
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    model.save_pretrained(folder / "gradients" / name)
    as_published(folder / "gradients" / name, MODELS[name]["arch"])
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    return {"logprobs": logprobs.detach(), **{f"gradient {key}": tensor for key, tensor in gradients.items()}}


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        settings, models = LAYOUTS[layout]
        config = tiny_values(**{f"trainer.{field}": value for field, value in settings.items()})
        options = {name: tiny_values(**one) for name, one in OPTIONS.items()}
        some = {name: options[name] for name in ("tower", "adapters")}
        of_model = {"tied": options, "deepstack": some, "experts": some}
        of_model = of_model if layout == "single" else {}
        settings = {"config": config, "models": models, "options": of_model}
        settings["towers"] = {name: towers(layout, name) for name in models}
        (folder / f"{layout}.json").write_text(json.dumps(settings))
        run_ranks("vision:compared", folder, layout, world=WORLD.get(layout, 2))

    return run


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_saved_policies_have_their_vision_tower(name: str, folder: Path, megatron: Any) -> None:
    from transformers import AutoModelForImageTextToText

    megatron("single")
    given = load_file(folder / name / "model.safetensors")
    for option in OPTIONS.keys() - {"adapters"} if name == "tied" else {"tower"}:
        out = folder / name / f"saved-{option}"
        _, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
        assert not any(report.values()), report
        with HFFolder(out) as saved:
            assert sorted(saved.names()) == sorted(given)
            change = {name: float((saved.read(name) - tensor).abs().max()) for name, tensor in given.items()}
        tower = [change.pop(name) for name in given if "visual." in name]
        assert min(change.values()) > 10 * TOWER_LR
        assert max(tower) < 3 * TOWER_LR if option == "tower" else not any(tower)
        assert option != "tower" or min(tower) > 0


@pytest.mark.parametrize("name", ["tied", "deepstack", "experts"])
def test_saved_adapters_give_the_saved_weights_with_peft(name: str, folder: Path, megatron: Any) -> None:
    import peft
    from transformers import AutoModelForImageTextToText

    megatron("single")
    base = AutoModelForImageTextToText.from_pretrained(folder / name, dtype=torch.float32)
    given = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, folder / name / "saved-adapters-peft").merge_and_unload().state_dict()
    saved = AutoModelForImageTextToText.from_pretrained(folder / name / "saved-adapters", dtype=torch.float32)
    changed = set()
    for key, tensor in saved.state_dict().items():
        torch.testing.assert_close(tensor, merged[key], rtol=0, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
        changed |= set() if tensor.equal(given[key]) else {key}
    ends = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")
    linear = {key for key in given if key.endswith(ends) and ".language_model.layers." in key}
    assert changed == linear


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logprobs_and_gradients_are_those_of_transformers(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    found: dict[str, Tensor] = {}
    for file in folder.glob(f"{layout}-{name}-?.safetensors"):
        found |= load_file(file)
    reference = expected(folder, name)
    for option in [key for key in found if key.startswith("started ")]:
        torch.testing.assert_close(found.pop(option), reference["logprobs"], rtol=0, atol=1e-5)
    for tower in towers(layout, name):
        rows, apart = found.pop(f"{tower} rows").tolist()
        assert rows < 0.8 * apart  # siblings share their images
    assert reference["logprobs"].std() > 0.3
    sharded = "cp" in layout
    of_all = {key for key in reference if not (sharded and key.startswith("gradient"))}
    of_text = {key for key in of_all if "visual." not in key}
    wanted = {f"{tower} {key}" for tower in towers(layout, name) for key in (of_all if tower == "trained" else of_text)}
    assert found.keys() == wanted
    for key, tensor in found.items():
        of = key.partition(" ")[2]
        assert tensor.abs().max() > 1e-3, key
        limit = 1e-5 if of == "logprobs" else 1e-4
        torch.testing.assert_close(tensor, reference[of], rtol=1e-5, atol=limit, msg=lambda m, key=key: f"{key}: {m}")


UPDATED: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"trainer.data_parallel": 2, "trainer.micro_batch_tokens": 40},
    "tp2-sp-cp2": {f"trainer.{name}": value for name, value in LAYOUTS["tp2-sp-cp2"][0].items()},
}


def updated(folder: Path, layout: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the figures of two updates, and the weights after them."""
    made = folder / f"updated-{layout}"
    made.mkdir()
    (made / "model").symlink_to(folder / "untied")
    (made / "groups.msgpack").symlink_to(folder / "groups.msgpack")
    settings = {"vision.lr": 2e-3, "trainer.optimizer.eps": 1e-3}
    config = tiny_config(**OPTIONS["tower"] | settings | UPDATED[layout])
    (made / "config.json").write_text(config.model_dump_json())
    (figures,) = run_ranks("updates:two", "all", [made], world=config.trainer.world_size)[0]
    with HFFolder(made / "out-all") as weights:
        return figures, {name: weights.read(name) for name in weights.names()}


def test_updates_of_a_trained_tower_do_not_depend_on_the_layout(folder: Path) -> None:
    """Replicas have different images, or none in a micro-batch, and ranks of a context have parts of an image."""
    figures, weights = updated(folder, "single")
    for layout in UPDATED.keys() - {"single"}:
        other_figures, other = updated(folder, layout)
        for mine, theirs in zip(figures, other_figures, strict=True):
            for name in ("loss", "grad_norm", "kl/reference", "logprob_gap/mean"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (layout, name)
        assert other.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    start = load_file(folder / "untied" / "model.safetensors")
    assert not [name for name, tensor in start.items() if tensor.equal(weights[name])]
