"""Tests of several tasks with different group sizes, and of evaluation during training, on the real parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.running import lines, nothing_is_left, run

pytestmark = pytest.mark.integration

SIZES = {"two": 8, "three": 16}


def test_tasks_are_mixed_by_weight_and_all_evaluated(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = run(
        run_dir,
        *("+task@tasks.two=copy", "tasks.two.params.digits=2", "tasks.two.weight=3", "tasks.two.group_size=8"),
        *("+task@tasks.three=copy", "+task@eval.sets.four=copy", "eval.sets.four.params.digits=4"),
        *("eval.every=4", "eval.samples=4", "eval.questions=20", "run.max_steps=12"),
    )
    groups = {task: sum(step[f"groups/batch/{task}"] for step in steps) for task in SIZES}
    assert sum(groups.values()) == 12 * 16
    assert groups["two"] / groups["three"] == pytest.approx(3, rel=0.4)
    summary = json.loads((run_dir / "summary.json").read_text())
    trained = sum(groups[task] * size for task, size in SIZES.items())
    assert sum(summary["staleness/histogram"].values()) == trained

    written = lines(run_dir / "eval.jsonl")
    evaluations = [written[i : i + 3] for i in range(0, len(written), 3)]
    assert all([line["set"] for line in one] == ["two", "three", "four"] for one in evaluations)
    assert {line["version_max"] for line in evaluations[0]} == {0}
    assert {line["version_min"] for line in evaluations[-1]} == {12}
    beside = [line for one in evaluations[1:-1] for line in one]
    assert beside
    assert all(4 <= line["version_min"] <= line["version_max"] <= 12 for line in beside)
    for line in (line for one in evaluations for line in one):
        assert (line["questions"], line["failed"]) == (20, 0)
        assert 0 <= line["pass@1"] <= line["pass@2"] <= line["pass@4"] <= 1
    assert summary["accuracy/after"] == pytest.approx(sum(line["accuracy"] for line in evaluations[-1]) / 3)
    nothing_is_left(run_dir)
