"""Tests of the files that a run leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.running import finish, lines, processes_of, run, start, wait_until

pytestmark = pytest.mark.integration
BUDGET = 24_000  # tokens: more than thirty steps
LEARNING = ("trainer.optimizer.lr=3e-3", "trainer.optimizer.warmup_steps=4")


def test_export_at_a_token_budget_serves_and_trains_on(tmp_path: Path) -> None:
    """The last published weights and the exported ones give the same greedy answers."""
    first, second = tmp_path / "first", tmp_path / "second"
    steps = run(first, f"run.token_budget={BUDGET}", *LEARNING, "trainer.save_hf_every=20")
    assert f"reached run.token_budget {BUDGET}" in json.loads((first / "summary.json").read_text())["reason"]
    assert sum(step["tokens/generated"] for step in steps[:-1]) < BUDGET
    assert [step["lr"] for step in steps[:5]] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])
    assert {path.name for path in first.glob("hf*")} >= {"hf", "hf-000020"}
    steps = run(second, f"model.path={first / 'hf'}", "rollout.max_staleness=0", "run.max_steps=2")
    start_of_all, *_, after = (line["reward/mean"] for line in lines(first / "eval.jsonl"))
    before = lines(second / "eval.jsonl")[0]["reward/mean"]
    assert after > start_of_all + 0.1, "the first run learned too little to tell its weights from others"
    assert before == pytest.approx(after, abs=0.02)  # one of 100 answers may tie in rounding
    assert max(step["logprob_gap/max"] for step in steps) < 1e-4


@pytest.mark.parametrize(
    ("victim", "settings"), [("router", ["weights.overlap=true"]), ("engine-0", ["trainer.data_parallel=2"])]
)
def test_final_evaluation_outlives_what_answers_it(victim: str, settings: list[str], tmp_path: Path) -> None:
    """No publish follows that would tell a new router of the engines, or give a new engine its weights."""
    run_dir = tmp_path / "run"
    slowly = ["run.max_steps=3", "rollout.batch_groups=4", "eval.questions=100", "eval.max_running=1"]
    with start(run_dir, *slowly, *settings) as process:
        exported = run_dir / "hf/model.safetensors.index.json"  # the evaluation comes next
        wait_until(exported.exists, process, run_dir, "the last step")
        os.kill(processes_of(process, run_dir)[victim], signal.SIGKILL)
        code, text = finish(process, run_dir, timeout=120)
    assert code == 0, text
    assert f"{victim} died (killed by SIGKILL" in text
    before, after = lines(run_dir / "eval.jsonl")
    assert (before["version_max"], after["version_min"], after["failed"]) == (0, 3, 0)
