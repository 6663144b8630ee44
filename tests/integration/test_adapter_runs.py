"""A whole run whose versions are adapters, with the death of an engine and of the trainer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.metrics.fields import unknown
from tests.integration.running import finish, lines, nothing_is_left, processes_of, run, start, wait_for_step
from tests.integration.test_agents import books_balance, groups_of

SETTINGS = (
    *("trainer.lora.rank=8", "weights.lora=versions", "rollout.max_staleness=2", "record=true", "checkpoint.every=5"),
    *("rollout.batch_groups=4", "rollout.group_size=8", "eval.questions=10", "eval.every=6"),
)


def check_versions(run_dir: Path, steps: int) -> None:
    """Check what adapters promise: one version for each completion, the bound, and few adapters."""
    records = lines(run_dir / "metrics.jsonl")
    assert [one["version"] for one in records] == list(range(1, steps + 1))
    assert unknown({name for one in records for name in one}) == []
    assert max(one["staleness/max"] for one in records) == 2
    assert max(one["adapters/resident"] for one in records) <= 2 + 2 + 1  # an evaluation's
    assert sum(one["requests/overtaken"] + one["tokens/inferred"] + one["time/pause"] for one in records) == 0
    completions = [turn.completion for g in groups_of(run_dir) for t in g.trajectories for turn in t.turns]
    assert {len(one.versions) for one in completions} == {1}
    assert len({span.version for one in completions for span in one.versions}) > steps // 2
    assert all(one["version_min"] == one["version_max"] for one in lines(run_dir / "eval.jsonl"))
    assert json.loads((run_dir / "summary.json").read_text())["transport"].startswith("adapters in shared memory")


@pytest.mark.integration
def test_a_run_with_adapters_survives_its_engine_and_is_resumed_after_the_trainers_death(tmp_path: Path) -> None:
    run_dir, again = tmp_path / "run", tmp_path / "again"
    with start(run_dir, *SETTINGS, "run.max_steps=20", "resume=auto") as process:
        wait_for_step(process, run_dir, 3)
        os.kill(processes_of(process, run_dir)["engine-0"], signal.SIGKILL)
        wait_for_step(process, run_dir, 8)
        os.kill(processes_of(process, run_dir)["trainer-0"], signal.SIGKILL)
        code, text = finish(process, run_dir)
    assert code != 0
    assert "engine-0 died (killed by SIGKILL" in text
    assert "weights.lora versions (as configured)" in text
    nothing_is_left(run_dir)
    run(run_dir, *SETTINGS, "run.max_steps=20", "resume=auto")
    check_versions(run_dir, 20)
    books_balance(run_dir)
    repeated = run(again, *SETTINGS, "mode=replay", f"replay.from={run_dir}", "replay.last=2", "checkpoint.every=null")
    trained = lines(run_dir / "metrics.jsonl")[:3]
    assert [one["loss"] for one in repeated] == [one["loss"] for one in trained]


@pytest.mark.campaign
@pytest.mark.parametrize("per", ["completion", "episode"])
def test_many_steps_never_exceed_the_bound(tmp_path: Path, per: str) -> None:
    run_dir = tmp_path / "run"
    run(run_dir, *SETTINGS, "run.max_steps=80", "engine.count=2", f"rollout.adapter_per={per}")
    check_versions(run_dir, 80)
    books_balance(run_dir)
