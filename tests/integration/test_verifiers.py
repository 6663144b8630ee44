"""An environment of verifiers on the real engine: it is learned, resumed after a kill with the same tasks alone, and
its faults cost their episodes and never become a reward."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.extensions.verifiers.playing import VENV, real
from tests.integration.books import balanced, groups_of
from tests.integration.running import finish, lines, nothing_is_left, processes_of, run, start, wait_for_step

pytestmark = [pytest.mark.integration, real]
STEPS = 16
DIGITS = [
    *("task=verifiers", f"task.name={VENV}", "rollout.batch_groups=8", "rollout.group_size=8", "eval.questions=8"),
    *(f"run.max_steps={STEPS}", "checkpoint.every=4", "resume=auto"),
]


def test_an_environment_is_learned_and_its_figures_are_the_runs(tmp_path: Path) -> None:
    steps = run(tmp_path / "run", *DIGITS)
    rewards = [step["reward/mean"] for step in steps]
    print("rewards:", " ".join(f"{reward:.3f}" for reward in rewards))
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05
    parts = [step["reward/part/digits"] for step in steps if "reward/part/digits" in step]
    assert max(abs(part - reward) for part, reward in zip(parts[-1:], rewards[-1:], strict=True)) < 0.1
    assert all(0 < step["episodes/metric/length"] <= 3 for step in steps if "episodes/metric/length" in step)
    assert steps[0]["logprob_gap/max"] < 1e-5, "the first batch has one version: engine and trainer agree"
    balanced(tmp_path / "run")
    nothing_is_left(tmp_path / "run")


def test_a_run_goes_on_after_a_kill_and_not_with_other_tasks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, *DIGITS) as process:
        wait_for_step(process, run_dir, 9)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with start(run_dir, *DIGITS, "task.params.args={taskset: {first: 1}}") as process:
        code, text = finish(process, run_dir)
    assert code != 0
    assert f"Task 0 of {VENV} had the key" in " ".join(text.split())
    steps = run(run_dir, *DIGITS)
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    assert len(lines(run_dir / "eval.jsonl")) >= 1
    balanced(run_dir)
    nothing_is_left(run_dir)


def test_every_playing_process_has_its_worker_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, *DIGITS, "processes.count=2", "rollout.max_failures=100") as process:
        wait_for_step(process, run_dir, 3)
        players = processes_of(process, run_dir)
        workers = [workers_of(players[name]) for name in ("episodes-0", "episodes-1")]
        assert [len(found) for found in workers] == [1, 1]
        workers[1][0].kill()
        code, text = finish(process, run_dir)
    assert code == 0, text
    steps = lines(run_dir / "metrics.jsonl")
    assert len(steps) == STEPS
    assert steps[-1]["episodes/metric/length"] > 0, "measures of both processes are the run's"
    assert "environment_died" in (run_dir / "warnings.jsonl").read_text()
    balanced(run_dir)
    nothing_is_left(run_dir, [one for found in workers for one in found])


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the workers of verifiers that a process has started."""
    return [
        one for one in psutil.Process(pid).children() if any("verifiers/worker.py" in word for word in one.cmdline())
    ]


def test_thousand_faulty_episodes_have_no_false_zero(tmp_path: Path) -> None:
    """In every fifth task a stage hangs or fails, a reward is not a number, or the worker dies; others give 1."""
    run_dir = tmp_path / "run"
    taskset = "taskset: {size: 600, every: 5}, agent: {timeout: {setup: 1, scoring: 1, finalize: 1}}"
    steps = run(
        run_dir,
        *("task=verifiers", "task.name=toy_faulty", f"task.params.venv={VENV}", f"task.params.args={{{taskset}}}"),
        *("rollout.batch_groups=8", "rollout.group_size=4", "run.max_steps=32", "eval.questions=0", "record=true"),
        *("rollout.retries=1", "rollout.max_failures=1000", "rollout.max_staleness=4"),
    )
    trained = [one.reward for group in groups_of(run_dir) for one in group.trajectories]
    reasons = {name.rpartition("/")[2]: n for name, n in steps[-1].items() if name.startswith("groups/rejected/")}
    print(f"{len(trained)} episodes with a reward, {trained.count(0.0)} of them 0; groups rejected: {reasons}")
    assert len(trained) >= 1000
    assert reasons.keys() >= {f"environment_{how}" for how in ("died", "error", "garbage", "timeout")}
    fine = [one for one in trained if one == 1.0]
    assert len(fine) > 0.8 * len(trained), "zeros are those of the two tasks that earn them"
    balanced(run_dir)
    nothing_is_left(run_dir)
