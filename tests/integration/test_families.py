"""Megatron's logits and gradients equal those of transformers for every model family, on one rank and in parallel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.models.families import OF_TYPE
from asyncrl.models.parts import CHOOSES
from asyncrl.models.tiny import write_random_model
from asyncrl.weights.folder import HFFolder
from tests.integration.families import (
    CASES,
    CHOOSING,
    PUBLISHED_AS,
    TEXT,
    check,
    exported,
    launch,
    written,
)
from tests.integration.fleet import ask, engines, logprobs, reloaded, settings
from tests.integration.publisher import SeededWeights, make, publish

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all models with transformers."""
    return written(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        launch(folder, layout, {})

    return run


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_and_gradients_are_those_of_transformers(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    check(folder, layout, name)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_transformers_loads_what_is_exported_and_finds_the_same_model(
    layout: str, name: str, folder: Path, megatron: Any
) -> None:
    megatron(layout)
    export = folder / f"{layout}-{name}"
    with HFFolder(folder / name) as given, HFFolder(export) as found:
        assert sorted(found.names()) == sorted(given.names())
        assert found.digest() == given.digest()
    if name not in PUBLISHED_AS:
        _, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
        assert not any(report.values()), report


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[1] in CHOOSING])
def test_biases_that_choose_experts_stay_bit_for_bit_through_training_and_casts(
    layout: str, name: str, folder: Path, megatron: Any
) -> None:
    megatron(layout)
    found = exported(folder, layout, name)
    given = {
        key: tensor for key, tensor in load_file(folder / name / "model.safetensors").items() if key.endswith(CHOOSES)
    }
    assert given
    for key, tensor in given.items():
        assert found[key].dtype == torch.float32
        assert found[key].equal(tensor), key
        assert not tensor.bfloat16().float().equal(tensor)  # the cast would show


PADDED = {"n_shared_experts", "num_shared_experts"}
"""Fields of models for whose shared experts no padding is known."""
SERVED = [family.model_type for family in TEXT if family.serving.on_cpu]


@pytest.mark.parametrize("kind", SERVED)
def test_engines_compute_what_transformers_computes_with_weights_of_the_folder_and_published_ones(
    kind: str, tmp_path: Path
) -> None:
    """Every publish is verified by the checksums of all parameters."""
    model = tmp_path / "model"
    write_random_model(
        model,
        kind,
        vocab=16,
        hidden=64,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=96,
        tied=False,
        seed=1,
        dtype="float32",
        max_positions=64,
        spread=0.15,
        fields={"moe_intermediate_size": 32} if PADDED & OF_TYPE[kind].tiny.keys() else {},
    )
    with engines(tmp_path, f"model.path={model}", "engine.count=1", "engine.dtype=float32") as fleet:
        weights = SeededWeights(model, share=0.05)
        config = settings(fleet.config, transport="tensor", verify_every=1)
        publisher = make(config, fleet.addresses, weights, tmp_path / "publish")
        for version in (0, 1):
            assert publish(publisher, version)["engines"] == 1
            served = reloaded(model, weights.at(version), tmp_path / f"v{version}")
            for found in ask(fleet, 24, version, stop_token_ids=[]):  # beyond what windows keep
                expected = logprobs(served, found.token_ids)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-5)
        publisher.fleet.close()
