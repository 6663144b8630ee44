"""Megatron's logits and gradients equal those of transformers for every model family, on one rank and in parallel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.families import (
    CASES,
    CHOOSES,
    CHOOSING,
    check,
    exported,
    launch,
    written,
)

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


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[1] in CHOOSING])
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
