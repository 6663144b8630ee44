"""An elastic run adds an engine while engines are the limit, and the engine ends with the run.

Launcher, asyncrl-engines, router and rollout process are real; engines and trainer are stubs (stub_run.py).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from asyncrl.extensions.plan.lengths import Lengths
from tests.integration.books import balanced
from tests.integration.faulty_users import write_questions
from tests.integration.ranks import ROOT
from tests.integration.running import finish, lines, nothing_is_left, start
from tests.integration.workload import Workload

STEPS = 32
LENGTHS = Lengths(mean=10.0, sigma=0.5, longest=24, group_size=4)
WORKLOAD = Workload(asdict(LENGTHS), 0.01, [0.0], 0.1, per_request=0.0005, max_running=4)
"""One engine takes about 1 s for a batch, two take half of it, and the trainer takes 0.1 s."""


Records = list[dict[str, Any]]


def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload, count: int, **changes: object
) -> tuple[Records, Records, str]:
    """Run `count` steps, of which no group is lost and none is too old. Return decisions, steps and output."""
    for name, value in {"PYTHONPATH": str(ROOT), **workload.environment()}.items():
        monkeypatch.setenv(name, value)
    run_dir, questions = tmp_path / "run", tmp_path / "questions.jsonl"
    write_questions(questions, 0, raises=0.0, hangs=0.0)
    overrides = {
        "run.max_steps": count,
        "plan.elastic": "act",
        "cluster.tls": "false",
        "rollout.batch_groups": 8,
        "rollout.group_size": LENGTHS.group_size,
        "rollout.max_staleness": 1,
        "rollout.max_new_tokens": LENGTHS.longest,
        "task": "file",
        "task.train_file": questions,
        "eval.questions": 0,
        **changes,
    }
    arguments = [f"{name}={value}" for name, value in overrides.items()]
    with start(run_dir, *arguments, module="tests.integration.stub_run") as process:
        code, text = finish(process, run_dir, 20.0 * count)
    assert code == 0, text
    steps = lines(run_dir / "metrics.jsonl")
    assert max(step["staleness/max"] for step in steps) <= 1
    ledger = balanced(run_dir)
    assert (ledger.groups.trained, ledger.groups.rejected) == (8 * count, {})
    nothing_is_left(run_dir)
    return lines(run_dir / "elastic.jsonl"), steps, text


@pytest.mark.integration
def test_controller_adds_an_engine_that_shortens_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"plan.max_engines": 2, "rollout.max_running_groups": "null", "weights.verify": "false"}
    decisions, steps, text = played(tmp_path, monkeypatch, WORKLOAD, STEPS, **changes)
    moved = [one for one in decisions if one["action"].endswith("engine")]
    assert [(one["action"], one["before"], one["after"]) for one in moved] == [("add_engine", 1, 2)], text
    assert all(f"elastic  step {one['step']}: {one['reason']}" in text for one in decisions)
    serving = [step["engines/serving"] for step in steps]
    assert serving == [1] * serving.count(1) + [2] * serving.count(2)
    at = serving.index(2)
    before, after = (median(one["time/step"] for one in some) for some in (steps[1:at], steps[at + 2 :]))
    print(f"{before:.2f} s a step, {after:.2f} s with two engines, from step {at} on")
    assert after < 0.85 * before
