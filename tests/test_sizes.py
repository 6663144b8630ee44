"""The sizes of results/sizes.md: each composes, stands on just its machines, fits, and is what the planner says."""

from __future__ import annotations

import pytest

from asyncrl.extensions.plan import shapes
from scripts.sizes import (
    ADAPTED_ROWS,
    MODELS,
    ROOM,
    ROWS,
    SEEING,
    adapted_row,
    documented,
    least,
    most_on_gpu,
    row,
    size,
)
from scripts.sizes import load as load_sized

FITTING = [(name, gpus, values) for name, gpus, values in ROWS if values is not None]
ACTIVE = {"qwen3_8b": 8.2, "llama3_70b": 70.6, "qwen3_30b_a3b": 3.3, "qwen3_235b_a22b": 22.2}
"""Billions, with the embedding, as their names have them."""


def test_documented_sizes_are_what_the_planner_says_now() -> None:
    """python scripts/sizes.py writes them anew."""
    now, then = documented()
    assert now == then


@pytest.mark.parametrize(("name", "gpus", "values"), FITTING, ids=str)
def test_a_size_stands_on_its_machines_and_fits(name: str, gpus: int, values: tuple[int, ...]) -> None:
    one = row(name, values)
    used = one.config.trainer.world_size + one.config.engine.count * one.config.engine.tensor_parallel
    assert (8 * one.machines, used) == (gpus, gpus)
    assert sum(one.trainer.values()) < ROOM
    assert sum(one.engine.values()) < ROOM
    assert one.core < 0.7
    assert one.config.weights.staging == "stream"
    assert one.config.rollout.batch_groups >= one.config.trainer.data_parallel  # no replica without a group


@pytest.mark.parametrize(("name", "gpus", "each", "values"), ADAPTED_ROWS, ids=str)
def test_adapters_fit_their_gpus_and_full_training_would_not(
    name: str, gpus: int, each: float, values: tuple[str, ...]
) -> None:
    """Full training takes 18 bytes for each parameter, which no GPU of theirs holds."""
    one = adapted_row(name, gpus, values)
    assert one.machines == 1
    assert most_on_gpu(one) < 0.9 * each
    count = shapes.parameters(one.weights).all
    assert 18 * count / one.config.trainer.world_size > each
    if one.config.trainer.lora.base == "nf4":
        assert one.trainer["frozen base"] < 0.31 * 2 * count / one.config.trainer.world_size


@pytest.mark.parametrize(("name", "text", "tower"), [("qwen2_5_vl_7b", 7.62, 0.677), ("qwen3_vl_8b", 8.19, 0.576)])
def test_image_experiments_fit_one_machine_with_their_tower(name: str, text: float, tower: float) -> None:
    one = size(load_sized(f"experiment={name}"), SEEING[name])
    assert one.machines == 1
    assert max(sum(one.trainer.values()), sum(one.engine.values())) < ROOM
    assert shapes.parameters(one.weights).all / 1e9 == pytest.approx(text, abs=0.01)
    assert one.trainer["frozen base"] / 2e9 == pytest.approx(tower, abs=0.001)


@pytest.mark.parametrize(("name", "gpus"), [(name, gpus) for name, gpus, values in ROWS if values is None])
def test_what_is_said_not_to_fit_does_not(name: str, gpus: int) -> None:
    assert least(name, gpus) > ROOM


def test_each_model_has_a_row_per_size_and_one_experiment() -> None:
    for model in MODELS:
        assert {8, 64, 512, 1024} <= {gpus for name, gpus, _ in ROWS if name == model}
        assert [values for name, _, values in ROWS if name == model].count(()) == 1


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_are_those_that_models_are_named_for(name: str) -> None:
    one = row(name, ())
    embedding = one.shape.vocab * one.shape.hidden
    assert (shapes.active(one.weights, one.shape) + embedding) / 1e9 == pytest.approx(ACTIVE[name], abs=0.1)


def test_a_token_of_the_cache_takes_what_its_heads_take() -> None:
    """Qwen3-235B: 94 layers of 4 keys and 4 values of 128 numbers, two bytes each; eight ranks hold each head twice."""
    one = row("qwen3_235b_a22b", ())
    assert one.engine["KV cache"] == one.config.engine.max_total_tokens * 94 * 2 * 4 * 128 * 2 // 4
    assert shapes.parameters(one.weights).routed / one.publish.nbytes > 0.4  # experts are nearly all that is sent
