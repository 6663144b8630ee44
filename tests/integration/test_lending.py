"""Trainers that lend their GPUs to engines while they wait (cluster.lend), with real engines on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from asyncrl.network.addresses import LEND, LOST, TRAINING
from tests.integration.running import (
    TIMEOUT,
    descendants,
    evidence,
    finish,
    lines,
    nothing_is_left,
    output,
    processes_of,
    start,
    wait_for_step,
)
from tests.integration.test_agents import books_balance
from tests.integration.test_colocated import LOGGED, RELEASE, RESUME, control_calls
from tests.integration.test_survival import wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LENDING = ["cluster.lend=true", "cluster.elastic=act", "eval.questions=0", "rollout.max_staleness=2"]
PATIENT = ["agent=tests.integration.patient:answer", f"+agent_params.file={__file__}"]
SLOW = [*PATIENT, "rollout.batch_groups=12", "rollout.group_size=2", "rollout.max_running_groups=4"]
"""Batches that take three times an agent's two seconds on any machine."""


@pytest.fixture(autouse=True)
def patient_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a run find the agent."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def loans(run_dir: Path) -> list[dict[str, float]]:
    """Return the steps with a loan."""
    return [step for step in lines(run_dir / "metrics.jsonl") if "time/lent" in step]


def wait_for_turn(process: subprocess.Popen[str], run_dir: Path, *, trains: bool) -> None:
    """Wait until the trainers have their GPUs back, or lend them."""
    deadline = time.monotonic() + TIMEOUT
    while (run_dir / TRAINING).exists() != trains:
        assert process.poll() is None, evidence(run_dir)
        assert time.monotonic() < deadline, evidence(run_dir)
        time.sleep(0.002)


def wait_for_loans(process: subprocess.Popen[str], run_dir: Path, more: int) -> None:
    """Wait for so many more steps in whose loan an engine served."""
    before = len(loans(run_dir))

    def served() -> bool:
        return sum(step["engines/lent"] > 0 for step in loans(run_dir)[before:]) >= more

    wait_until(served, process, run_dir, f"{more} loans")


def restarted(run_dir: Path, times: int) -> bool:
    return output(run_dir).count("engine-lent-0 died") >= times


def within_bound(run_dir: Path) -> None:
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["staleness/max"] for step in steps) <= 2


def test_engines_serve_in_long_waits_and_are_asked_for_every_step_in_order(tmp_path: Path) -> None:
    """Two trainer ranks. Each loan is verified: the checksums of the lent engine are those of the version."""
    run_dir = tmp_path / "run"
    with start(run_dir, *LENDING, *SLOW, *LOGGED, "trainer.data_parallel=2", "run.max_steps=5") as process:
        wait_for_step(process, run_dir, 1)
        assert loans(run_dir) == []
        (run_dir / LEND).touch()  # as the controller does
        code, text = finish(process, run_dir)
    assert code == 0, text
    found = loans(run_dir)
    assert len(found) >= 2
    assert all(step["engines/lent"] == 1 for step in found)
    assert all(step["time/lend"] + step["time/lent"] <= step["time/wait_batch"] for step in found)
    log = (run_dir / "logs" / "engine-lent-0.log").read_text()
    assert control_calls(log) == RELEASE + (RESUME + RELEASE) * len(found)
    assert log.count("POST /weights_checker") == len(found)
    assert "POST /generate" in log
    ledger = books_balance(run_dir)
    assert ledger["groups"]["rejected"] == {}
    assert lines(run_dir / LOST) == []
    within_bound(run_dir)
    nothing_is_left(run_dir)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_an_engine_that_fails_in_a_loan_or_between_two_comes_back_and_a_killed_run_resumes(
    number: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = [*LENDING, *SLOW, "weights.timeout=10", "checkpoint.every=2", "run.max_steps=100000"]
    with start(run_dir, *settings) as process:
        wait_for_step(process, run_dir, 1)
        (run_dir / LEND).touch()
        for times, trains in enumerate((False, True), 1):
            wait_for_loans(process, run_dir, 1)
            wait_for_turn(process, run_dir, trains=trains)
            os.killpg(processes_of(process, run_dir)["engine-lent-0"], number)
            wait_until(partial(restarted, run_dir, times), process, run_dir, "the engine is restarted")
            wait_for_loans(process, run_dir, 2)
        wait_for_turn(process, run_dir, trains=False)
        started = descendants(process)
        os.kill(processes_of(process, run_dir)["trainer-0"], signal.SIGKILL)
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "trainer-0 died: killed by SIGKILL" in text
    nothing_is_left(run_dir, started)
    within_bound(run_dir)
    steps = len(lines(run_dir / "metrics.jsonl"))
    with start(run_dir, *settings[:-1], f"run.max_steps={steps + 2}", "resume=auto") as process:
        code, text = finish(process, run_dir)
    assert code == 0, text
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps + 2
    books_balance(run_dir)
    within_bound(run_dir)


def test_a_run_that_is_asked_to_stop_during_a_loan_saves_what_it_has_and_goes_on_later(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [*LENDING, *SLOW, "checkpoint.every=100", "run.max_steps=3"]
    with start(run_dir, *settings) as process:
        wait_for_step(process, run_dir, 1)
        (run_dir / LEND).touch()
        wait_for_turn(process, run_dir, trains=False)
        process.send_signal(signal.SIGUSR1)
        code, text = finish(process, run_dir)
    assert code == 75, text
    with start(run_dir, *settings, "resume=auto") as process:
        code, text = finish(process, run_dir)
    assert code == 0, text
    assert len(lines(run_dir / "metrics.jsonl")) == 3
    books_balance(run_dir)
    within_bound(run_dir)
