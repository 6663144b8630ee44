"""Plans name the split that is fastest in the simulation, and settings that a run accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asyncrl.planner import inputs
from asyncrl.planner.cli import main
from asyncrl.planner.report import overrides, report
from asyncrl.planner.search import Choices, Plan, search
from asyncrl.planner.simulation import simulate
from scripts import sizes

NUMBERS: dict[str, Any] = {
    "gpus": 6,
    "batch_groups": 8,
    "group_size": 4,
    "mean": 400,
    "longest": 3000,
    "max_staleness": 4,
    "per_token": 0.012,
    "per_request": 0.0005,
    "max_running": 16,
    "train_rate": 600,
    "train_fixed": 1,
    "pause": 0.5,
}


def planned(**changes: Any) -> Plan:
    given = inputs.parse(NUMBERS | changes)
    return search(inputs.splits(given), given.workload, Choices.up_to(given.max_staleness), few=3, seeds=2)


def test_no_other_split_is_faster_in_the_simulation() -> None:
    given, plan = inputs.parse(NUMBERS), planned()
    for split in inputs.splits(given):
        if not split.colocated:
            found = simulate(given.workload(0), split.setting(4, 4), 16, 10)
            assert 32 / found.step < 1.1 * plan.best.rate
    assert plan.best.staleness <= 4
    assert abs(plan.best.law_error) < 0.15
    assert plan.best.law.binds in plan.best.law.limits
    assert max(plan.more_engine, plan.more_trainer) > 0


def test_batches_trained_during_publishes_are_planned_where_the_bound_allows_them() -> None:
    long = {"pause": 10.0, "trainers": 1}
    beside, after = planned(**long, overlap=True), planned(**long)
    assert beside.best.rate > 1.1 * after.best.rate
    assert "weights.overlap=true" in overrides(beside.best)
    assert "weights.overlap=true" not in overrides(after.best)
    assert beside.colocated is not None
    assert not beside.colocated.setting.overlap
    assert not beside.best.split.setting(0, 0).overlap


def test_a_trainer_that_publishes_beside_training_needs_memory_for_every_bucket(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    shape = {"model": str(tmp_path), "gpus": 16, "trainers": 8, "mean": 1500, "longest": 4096}
    stream, full = (
        max(split.memory["trainer"] for split in inputs.splits(inputs.parse(shape | {"overlap": overlap})))
        for overlap in (False, True)
    )
    assert full > stream


def test_equal_answers_are_best_generated_and_trained_in_turns_where_switching_is_free() -> None:
    equal = {"sigma": 1e-6, "longest": 4000, "gpus": 2, "switch": 0, "pause": 0, "train_fixed": 0, "max_staleness": 1}
    found = planned(**equal, per_request=1e-6, train_rate=1000)
    assert found.synchronous
    assert overrides(found.colocated)[0] == "cluster.placement=colocated"  # type: ignore[arg-type]
    assert not planned(sigma=1.3, switch=15.0).synchronous


def test_a_model_is_planned_with_layouts_that_fit_and_settings_that_a_run_accepts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    given = inputs.parse(
        {"model": str(tmp_path), "gpus": 16, "mean": 1500, "longest": 4096, "prompt": 200, "max_staleness": 2}
    )
    splits = inputs.splits(given)
    assert all(sum(split.memory.values()) <= 2 * inputs.ROOM * 80e9 for split in splits)
    plan = search(splits, given.workload, Choices.up_to(given.max_staleness), few=0)
    assert plan.best.split.engines * plan.best.split.engine_gpus + plan.best.split.trainers <= 16
    config = sizes.load("experiment=qwen3_8b", values=overrides(plan.best))
    assert config.engine.count == plan.best.split.engines
    assert config.trainer.world_size == plan.best.split.trainers
    assert sizes.size(config, sizes.MODELS["qwen3_8b"]).trainer
    assert report(plan)["best"]["memory"].keys() == {"trainer", "engine"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpus=8"], "mean: got None. This field has no value"),
        (["gpus=0", "mean=10", "longest=20"], "gpus: got 0. Expected `int` >= 1"),
        (["gpus=many", "mean=10", "longest=20"], "gpus: got 'many'"),
        (["gpu=h100", "gpus=8", "mean=10", "longest=20"], "per_token: got None. Set it, or model="),
        (["gpus=8", "mean=.nan", "longest=20"], "mean: got nan. Expected `float`"),
        (["speed=3"], "speed: got 3. No such field"),
        (["nowhere.yaml"], "INPUT: got 'nowhere.yaml'"),
        (["model=nowhere", "gpus=8", "mean=10", "longest=20"], "model: got 'nowhere'"),
        ([f"{name}={value}" for name, value in (NUMBERS | {"gpus": 1}).items()], "gpus: got 1. Trainer and engines"),
    ],
)
def test_wrong_input_is_named_with_its_remedy(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_command_prints_overrides_last_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text(json.dumps(NUMBERS))
    page, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main([str(numbers), "max_staleness=2", "--simulate", "0", "--json", str(page), "--svg", str(plot)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1].split()
    found = json.loads(page.read_text())
    assert last == found["overrides"]
    assert found["best"]["max_staleness"] <= 2
    lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3  # bounds 0, 1 and 2
