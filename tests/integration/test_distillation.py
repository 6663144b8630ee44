"""Tests of distillation in the real trainer without engines: batches contain a teacher's log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.models.tiny import write_random_model
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

ROOT = str(Path(__file__).parents[2])
VOCABULARY = 33
PURE = {
    "teacher.model": "/nowhere",
    "algo.advantage": "none",
    "distill.coefficient": 1.0,
    "algo.entropy_bonus": 0.0,
    "algo.correction.cap": 1e9,
    "trainer.share_prompts": True,
}
SMALL = {"trainer.micro_batch_tokens": 40}
CASES: dict[str, dict[str, Any]] = {
    "same": {},
    "advantage": {},
    "loss": {"distill.place": "loss"},
    "scored": {"algo.epochs": 2, "trainer.optimizer.lr": 1e-12},
    "small": SMALL,
    "discounted": {"distill.discount": 0.9},
    "discounted-small": {"distill.discount": 0.9, **SMALL},
    "warm": {"rollout.temperature": 0.8},
    "warm-loss": {"rollout.temperature": 0.8, "distill.place": "loss"},
    "off": {"algo.advantage": "grpo", "distill.coefficient": 0.0},
    "reference": {"algo.kl.reference": "teacher", "algo.kl.coefficient": 0.1, "algo.kl.estimator": "k2"},
}
LAYOUTS: dict[str, dict[str, Any]] = {"single": {}, "tp2": {"trainer.tensor_parallel": 2}}


def groups() -> list[Group]:
    """Return groups of unequal lengths, some with tool output in between.

    All rewards are equal, so they give no signal.
    """
    draw = random.Random(3)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(low, high))]

    def turn(observation: list[int]) -> Turn:
        tokens = ids(1, 7)
        written = Completion(tokens, [-4 + draw.random() for _ in tokens], [VersionSpan(0, 0, len(tokens))], "stop")
        return Turn(observation, written, teacher=[-4 + draw.random() for _ in tokens])

    return [
        Group(
            f"g{slot}",
            slot,
            ids(3, 9),
            [Trajectory([turn([]), *([turn(ids(2, 4))] if draw.random() < 0.4 else [])], 0.5) for _ in range(4)],
            "drawn",
        )
        for slot in range(6)
    ]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, float]]]:
    """Return a function of layout and case that returns the figures of one update."""
    folder = tmp_path_factory.mktemp("distillation")
    sizes = {"vocab": VOCABULARY, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 64}
    write_random_model(folder / "model", "llama", **sizes, tied=False, seed=1, dtype="float32", spread=0.2)
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(groups()))

    @cache
    def found(layout: str) -> dict[str, dict[str, float]]:
        for case, changes in CASES.items():
            config = tiny_config(**(PURE | LAYOUTS[layout] | changes))
            (folder / f"config-{layout}-{case}.json").write_text(config.model_dump_json())
        ranks: list[dict[str, dict[str, float]]]
        ranks = run_ranks("distill:every_case", folder, layout, world=2 if layout == "tp2" else 1)
        return ranks[0]

    return found


Figures = Callable[[str], dict[str, dict[str, float]]]


def test_policy_that_is_its_own_teacher_learns_nothing(figures: Figures) -> None:
    found = figures("single")
    assert found["same"]["grad_norm"] < 1e-6 * found["advantage"]["grad_norm"]
    assert found["same"]["kl/teacher"] < 1e-12


def test_groups_run_where_a_teacher_is_heard(figures: Figures) -> None:
    found = figures("single")
    assert found["advantage"]["groups/trained"] == found["loss"]["groups/trained"] == 6
    assert found["off"]["groups/trained"] == found["off"]["grad_norm"] == 0


def test_advantage_and_loss_have_one_gradient(figures: Figures) -> None:
    found = figures("single")
    assert found["advantage"]["grad_norm"] > 0.01
    assert found["loss"]["grad_norm"] == pytest.approx(found["advantage"]["grad_norm"], rel=1e-4)


def test_both_forms_agree_at_another_temperature(figures: Figures) -> None:
    found = figures("single")
    assert found["warm-loss"]["grad_norm"] == pytest.approx(found["warm"]["grad_norm"], rel=1e-4)
    assert found["warm"]["grad_norm"] != pytest.approx(found["advantage"]["grad_norm"], rel=1e-2)
    assert "kl/teacher" not in found["warm"]


def test_policy_scored_beforehand_is_the_one_in_training(figures: Figures) -> None:
    found = figures("single")
    for name in ("kl/teacher", "teacher/gap", "grad_norm"):
        assert found["scored"][name] == pytest.approx(found["advantage"][name], rel=1e-4)


def test_teacher_is_the_reference_without_weights_of_it(figures: Figures) -> None:
    found = figures("single")
    assert found["reference"]["kl/reference"] == found["reference"]["kl/teacher"]
    assert found["reference"]["grad_norm"] > found["advantage"]["grad_norm"]
    assert "kl/reference" not in found["advantage"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_does_not_depend_on_micro_batches_or_ranks(layout: str, figures: Figures) -> None:
    one, found = figures("single"), figures(layout)
    assert one["discounted"]["grad_norm"] != pytest.approx(one["advantage"]["grad_norm"], rel=1e-2)
    for case in ("advantage", "discounted"):
        for name in ("grad_norm", "kl/teacher", "teacher/gap", "loss"):
            for other in (case, "small" if case == "advantage" else "discounted-small"):
                assert found[other][name] == pytest.approx(one[case][name], rel=1e-4, abs=1e-6), (other, name)
