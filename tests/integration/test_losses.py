"""Every loss, correction and aggregation in float64: figures and gradients do not depend on the split into parts and
micro-batches, their order, packing, and data, tensor, sequence and pipeline parallelism over 1, 2 and 4 processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES
from asyncrl.algo.masks import MASKS
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.losses import ALGORITHMS, BOUNDS, LAYOUTS, VOCAB, joined, runs
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

CLOSE = 1e-12  # gradients are up to about 1
NOT_OF_THE_ALGORITHM = {"tokens/packed", "tokens/shared"}
ALIKE = [
    {"loss-gspo", "loss-gspo_token"},  # with one advantage for all tokens
    {"loss-ppo", "loss-minirl"},  # PPO's clip ends a gradient where MiniRL masks it
    {"sequence", "loss-gspo_token"},  # where one step starts
]
"""Losses that have the same gradient, but different values."""
PARALLEL = [layout for layouts in LAYOUTS.values() for layout in layouts if layout != "single"]
CASES = [(layout, algorithm) for layout in PARALLEL for algorithm in ALGORITHMS if runs(layout, algorithm)]
"""Mini-batches are parts of the batch in its order, and a batch in parts has a single step."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return figures and gradients of a layout by algorithm, with one launch per number of processes."""
    folder = tmp_path_factory.mktemp("losses")
    sizes = {"vocab": VOCAB, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 24}
    write_random_model(folder / "model", "qwen3", **sizes, tied=True, seed=4, dtype="float32", spread=0.15)
    (folder / "config.json").write_text(tiny_config(**{"rollout.temperature": 0.8}).model_dump_json())

    @cache
    def launch(ranks: int) -> Any:
        return joined(run_ranks("updates:every_loss", folder, world=ranks))

    return lambda layout: launch(next(ranks for ranks, layouts in LAYOUTS.items() if layout in layouts))[layout]


def test_every_loss_and_correction_has_a_case() -> None:
    assert {settings["loss"] for settings in ALGORITHMS.values() if "loss" in settings} == set(LOSSES)
    weights = [settings.get("correction") for settings in ALGORITHMS.values()]
    assert {one["name"] for one in weights if isinstance(one, dict)} == set(CORRECTIONS)
    assert BOUNDS.keys() == MASKS.keys()


@pytest.mark.parametrize(("layout", "algorithm"), CASES)
def test_figures_and_gradients_do_not_depend_on_the_layout(layout: str, algorithm: str, outcome: Any) -> None:
    (figures, gradients), (reference, expected) = outcome(layout), outcome("single")
    for name, value in reference[algorithm].items():
        if name not in NOT_OF_THE_ALGORITHM:
            assert figures[algorithm][name] == pytest.approx(value, rel=0, abs=CLOSE), name
    mine = {name: tensor for name, tensor in gradients.items() if name.startswith(f"{algorithm}/")}
    theirs = {name: tensor for name, tensor in expected.items() if name.startswith(f"{algorithm}/")}
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(
            mine[name], tensor, rtol=0, atol=CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_weight_has_a_gradient_and_every_algorithm_its_own(algorithm: str, outcome: Any) -> None:
    """Otherwise, agreement between layouts would mean little."""
    _, gradients = outcome("single")
    settings = ALGORITHMS[algorithm]
    steps = settings.get("epochs", 1) * settings.get("mini_batches", 1)
    mine = {name: tensor for name, tensor in gradients.items() if name.startswith(f"{algorithm}/")}
    assert {int(name.split("/")[1]) for name in mine} == set(range(steps))
    for name, tensor in mine.items():
        assert float(tensor.abs().max()) > 1e-6, name
    of_norm = gradients[f"{algorithm}/{steps - 1}/model.norm.weight"]
    for other in ALGORITHMS.keys() - set().union({algorithm}, *(alike for alike in ALIKE if algorithm in alike)):
        theirs = gradients.get(f"{other}/{steps - 1}/model.norm.weight")
        assert theirs is None or not torch.allclose(of_norm, theirs, rtol=0, atol=1e-6), other
