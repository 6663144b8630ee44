"""Engines and the router die during a run, which continues with every group and token accounted for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from asyncrl.extensions.timelines.reader import TimelineReader
from asyncrl.observability.intervals import RETRY
from asyncrl.observability.timeline import GroupTimeline, ProcessSpan
from tests.integration.books import balanced
from tests.integration.running import (
    finish,
    lines,
    nothing_is_left,
    processes_of,
    serving,
    start,
    wait_for_step,
    wait_until,
)

SMALL = ("rollout.batch_groups=4", "rollout.group_size=8", "eval.questions=0")


def all_is_accounted_for(run_dir: Path) -> None:
    assert balanced(run_dir).groups.rejected == {}, "a group was lost"
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["staleness/max"] for step in steps) <= 2


@pytest.mark.integration
@pytest.mark.parametrize("overlap", [pytest.param("false", marks=pytest.mark.campaign), "true"])
def test_the_only_engine_is_killed_and_comes_back(overlap: str, tmp_path: Path) -> None:
    """Also with a publish beside training, which does not find it or loses it."""
    run_dir = tmp_path / "run"
    with start(run_dir, "run.max_steps=12", f"weights.overlap={overlap}", *SMALL) as process:
        wait_for_step(process, run_dir, 3)
        os.kill(processes_of(process, run_dir)["engine-0"], signal.SIGKILL)
        code, text = finish(process, run_dir)
    assert code == 0, text
    assert "engine-0 died (killed by SIGKILL" in text
    assert sum(step["requests/broken"] for step in lines(run_dir / "metrics.jsonl")) > 0
    all_is_accounted_for(run_dir)
    nothing_is_left(run_dir)
    records = list(TimelineReader(run_dir).new())
    (restart,) = [one for one in records if isinstance(one, ProcessSpan) and one.name == "restart"]
    assert restart.attributes["process"] == "engine-0"
    episodes = (one for record in records if isinstance(record, GroupTimeline) for one in record.episodes)
    assert any(one.phase == RETRY for episode in episodes for one in episode.intervals)


@pytest.mark.campaign  # test_hangs.py stops an engine and kills the router, test_weight_faults.py has an engine hang
def test_hung_engine_and_killed_router_are_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = ["run.max_steps=100000", "eval.questions=0", "engine.count=2", "weights.timeout=10"]
    with start(run_dir, *overrides, "trainer.data_parallel=2") as process:
        wait_for_step(process, run_dir, 3)
        running = processes_of(process, run_dir)
        for member in [psutil.Process(running["engine-1"]), *psutil.Process(running["engine-1"]).children(True)]:
            member.send_signal(signal.SIGSTOP)
        wait_until(lambda: serving(run_dir) == 1, process, run_dir, "engine-1 was given up")
        os.kill(running["router"], signal.SIGKILL)
        killed_at = len(lines(run_dir / "metrics.jsonl"))
        wait_for_step(process, run_dir, killed_at + 5)
        wait_until(lambda: serving(run_dir) == 2, process, run_dir, "engine-1 came back")
        process.send_signal(signal.SIGINT)
        code, text = finish(process, run_dir)
    assert code == 128 + signal.SIGINT, text
    assert "engine-1 died (killed by SIGKILL" in text
    assert "router died (killed by SIGKILL" in text
    nothing_is_left(run_dir)
