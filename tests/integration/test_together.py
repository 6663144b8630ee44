"""Options that change every part of a run, at once: a plan, several engines and rollout processes, quantization."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.extensions.plan.auto_plan import PLAN
from tests.integration.books import check_books, check_replay
from tests.integration.running import (
    RUN,
    STEPS,
    finish,
    go_on_to_the_end,
    lines,
    nothing_is_left,
    processes_of,
    start,
    wait_for_step,
)

SETTINGS = (
    *("engine.count=2", "processes.count=2", "quantized.format=fp8_simulated", "plan.apply=auto"),
    "weights.verify_every=1",
)


@pytest.mark.campaign  # each option has tests of its own
def test_planned_run_resumes_and_its_replay_is_equal(tmp_path: Path) -> None:
    """The books balance over both deaths, and the recording trains the same weights, bit for bit."""
    run_dir = tmp_path / "run"
    with start(run_dir, *RUN, *SETTINGS) as launcher:
        wait_for_step(launcher, run_dir, 3)
        os.kill(processes_of(launcher, run_dir)["episodes-1"], signal.SIGKILL)
        wait_for_step(launcher, run_dir, 7)
        launcher.kill()  # its children die with it
        _, text = finish(launcher, run_dir)
    assert "episodes-1 died (killed by SIGKILL" in text
    assert len(lines(run_dir / "metrics.jsonl")) < STEPS
    plan = (run_dir / PLAN).read_text()
    assert "resuming from" in go_on_to_the_end(run_dir, *SETTINGS)
    nothing_is_left(run_dir)
    check_books(run_dir)
    assert json.loads((run_dir / PLAN).read_text())["overrides"] == json.loads(plan)["overrides"]
    steps = lines(run_dir / "metrics.jsonl")
    assert {step["engines/serving"] for step in steps} == {2}
    assert min(step["quantization/error"] for step in steps) > 0
    assert "plan/error/samples_per_s" in json.loads((run_dir / "summary.json").read_text())
    check_replay(run_dir, tmp_path, *SETTINGS[:3], schedule=False)
