"""Megatron's logits and gradients equal those of transformers for every model family, on one rank and in parallel."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.launch.main import CONF
from asyncrl.models.tiny import write_random_model
from tests.integration.families import CHOOSES, EXPERTS, MODELS, factors, groups
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({}, list(MODELS)),
    "tp2": ({"tensor_parallel": 2, "sequence_parallel": True}, list(MODELS)),
    "tp4": ({"tensor_parallel": 4, "sequence_parallel": True}, ["llama-tied", "qwen2", "qwen3", "qwen3-moe"]),
    "pp2": ({"pipeline_parallel": 2}, list(MODELS)),
    "ep2": ({"data_parallel": 2, "expert_parallel": 2}, EXPERTS),
}
CASES = [(layout, model) for layout, (_, models) in LAYOUTS.items() for model in models]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all models with transformers."""
    return written(tmp_path_factory.mktemp("families"))


def written(made: Path) -> Path:
    """Write all models into an empty folder, which is returned."""
    for seed, (name, (kind, tied, fields)) in enumerate(MODELS.items()):
        write_random_model(
            made / name,
            kind,
            vocab=257,
            hidden=32,
            layers=4,
            heads=4,
            kv_heads=4 if kind == "deepseek_v3" else 2,
            intermediate=48,
            tied=tied,
            seed=seed,
            dtype="float32",
            max_positions=64,
            spread=0.15,
            fields=fields,
        )
    return made


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        launch(folder, layout, {})

    return run


def launch(folder: Path, layout: str, further: dict[str, Any]) -> None:
    """Run all models of a layout, with further settings of the trainer."""
    settings, models = LAYOUTS[layout]
    with initialize_config_dir(str(CONF), version_base=None):
        config: Any = OmegaConf.to_container(compose("train", ["experiment=tiny"]), resolve=True)
    trainer = {**config["trainer"], **settings, **further}
    (folder / f"{layout}.json").write_text(json.dumps({"trainer": trainer, "models": models}))
    ranks = trainer["tensor_parallel"] * trainer["pipeline_parallel"] * trainer["data_parallel"]
    run_ranks("rank_families.py", str(folder), layout, world=ranks)


@cache
def transformers(folder: Path, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logits of every group's targets, and the gradients by HF name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    logits = []
    for group in groups():
        rows = []
        for sample in group:
            out = model(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0]
            rows.append(out[len(sample.prompt_ids) - 1 : -1])
        logits.append(torch.cat(rows))
    sum((found * factors(group, 257)).sum() for group, found in enumerate(logits)).backward()
    for weight in model.parameters():  # transformers itself names the parts of its stacked experts
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    model.save_pretrained(folder / "gradients" / name)
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    return [found.detach() for found in logits], gradients


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_and_gradients_are_those_of_transformers(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    check(folder, layout, name)


def check(folder: Path, layout: str, name: str) -> None:
    """Compare what the ranks of a layout wrote with transformers."""
    logits, gradients = transformers(folder, name)
    replicas = LAYOUTS[layout][0].get("data_parallel", 1)
    for replica in range(replicas):
        mine = load_file(folder / f"{layout}-{name}-{replica}.logits")["logits"]
        torch.testing.assert_close(mine, torch.cat(logits[replica::replicas]), rtol=0, atol=2e-5)
    mine = exported(folder, layout, name)
    expected = {key: tensor for key, tensor in gradients.items() if not key.endswith(CHOOSES)}
    assert {key for key in mine if not key.endswith(CHOOSES)} == expected.keys()
    for key, tensor in expected.items():
        if ".experts." not in key:  # some are chosen by no token of so small a batch
            assert tensor.abs().max() > 1e-3, key
        torch.testing.assert_close(mine[key], tensor, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def exported(folder: Path, layout: str, name: str) -> dict[str, Tensor]:
    """Return the tensors that the ranks of all pipeline stages wrote: gradients, and the biases that choose experts."""
    stages = [load_file(file) for file in folder.glob(f"{layout}-{name}-?.gradients")]
    return {key: tensor for stage in stages for key, tensor in stage.items()}


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[1].startswith(("glm4", "deepseek"))])
def test_biases_that_choose_experts_stay_bit_for_bit_through_training_and_casts(
    layout: str, name: str, folder: Path, megatron: Any
) -> None:
    megatron(layout)
    found = exported(folder, layout, name)
    given = {key: tensor for key, tensor in load_file(folder / name / "model.safetensors").items() if CHOOSES in key}
    assert given
    for key, tensor in given.items():
        assert found[key].dtype == torch.float32
        assert found[key].equal(tensor), key
        assert not tensor.bfloat16().float().equal(tensor)  # the cast would show
