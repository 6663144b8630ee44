"""The run ends if any process dies and is not restarted: with a diagnosis that names the process, a non-zero exit code,
and no process left."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.running import descendants, finish, nothing_is_left, processes_of, start, wait_for_step

VICTIMS = ["engine", "router", "rollout", "trainer-0", "trainer-1"]
NAMES = {"engine": "engine-0"}
DEADLINE = 60.0  # from the death to the launcher's exit


def _kill_and_check(tmp_path: Path, victim: str, step: int, delay: float) -> None:
    run_dir = tmp_path / f"{victim}-{step}"
    overrides = ["run.max_steps=100000", "eval.questions=0", "trainer.data_parallel=2", "cluster.on_engine_death=fail"]
    with start(run_dir, *overrides) as process:
        wait_for_step(process, run_dir, step)
        time.sleep(delay)
        started = descendants(process)
        os.kill(processes_of(process, run_dir)[NAMES.get(victim, victim)], signal.SIGKILL)
        code, text = finish(process, run_dir, DEADLINE)
    assert code == 1, text
    assert f"{NAMES.get(victim, victim)} died: killed by SIGKILL" in text, text
    nothing_is_left(run_dir, started)


@pytest.mark.campaign  # of an engine: test_intruder.py, of a trainer: test_colocated.py, the others: test_resume.py
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_ends_the_run_with_a_diagnosis(victim: str, tmp_path: Path) -> None:
    _kill_and_check(tmp_path, victim, step=2, delay=0.0)


@pytest.mark.campaign
def test_the_launchers_own_death_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, "run.max_steps=100000", "eval.questions=0") as process:
        wait_for_step(process, run_dir, 2)
        started = descendants(process)
        process.kill()
        process.wait(10)
    nothing_is_left(run_dir, started)


@pytest.mark.campaign
@pytest.mark.parametrize("trial", range(int(os.environ.get("ASYNCRL_TRIALS", "20"))))
def test_a_death_at_any_moment_ends_the_run(trial: int, tmp_path: Path) -> None:
    choice = random.Random(trial)
    _kill_and_check(tmp_path, choice.choice(VICTIMS), step=choice.randrange(1, 20), delay=choice.random())
