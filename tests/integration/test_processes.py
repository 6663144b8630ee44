"""Real processes that play episodes: one that is killed or hangs is replaced, its groups are played anew and the books
balance; neither their number nor a death changes a deterministic run. test_resume.py resumes runs with other numbers of
them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.books import check_books, check_replay, trained, weights
from tests.integration.running import (
    DETERMINISTIC,
    RUN,
    STEPS,
    finish,
    lines,
    nothing_is_left,
    processes_of,
    run,
    start,
    wait_for_step,
)

pytestmark = [pytest.mark.integration, pytest.mark.campaign]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hung_process_restarts_and_groups_replay(number: signal.Signals, tmp_path: Path) -> None:
    run_dir, settings = tmp_path / "run", ["processes.count=2", "cluster.stall_timeout=8"]
    with start(run_dir, *RUN, *settings) as launcher:
        wait_for_step(launcher, run_dir, 2)
        os.kill(processes_of(launcher, run_dir)["episodes-1"], number)
        code, text = finish(launcher, run_dir)
    assert code == 0, text
    assert "episodes-1 died (killed by SIGKILL" in text
    assert "process" not in json.loads((run_dir / "summary.json").read_text())["ledger"]["groups"]["rejected"]
    check_books(run_dir)
    check_replay(run_dir, tmp_path)
    nothing_is_left(run_dir)


def test_deterministic_run_ignores_the_number_of_processes(tmp_path: Path) -> None:
    one, two = (tmp_path / f"with-{count}" for count in (1, 2))
    expected = run(one, *RUN, *DETERMINISTIC)
    with start(two, *RUN, *DETERMINISTIC, "processes.count=2") as launcher:
        wait_for_step(launcher, two, 3)
        os.kill(processes_of(launcher, two)["episodes-0"], signal.SIGKILL)
        code, text = finish(launcher, two)
    assert code == 0, text
    assert "episodes-0 died (killed by SIGKILL" in text
    found = lines(two / "metrics.jsonl")
    assert max(step["processes/replayed"] for step in found) > 0
    assert trained(found) == trained(expected)
    assert weights(two) == weights(one)
    assert len(expected) == STEPS
