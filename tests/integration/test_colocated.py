"""Engines and trainers in turns (cluster.placement=colocated), with real engines on a CPU: they are asked for the steps
of the hand-over in order, train what the other placement trains, and a death during a turn ends or is mended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from itertools import groupby
from pathlib import Path

import pytest

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.network.addresses import TRAINING
from tests.integration.books import tensors
from tests.integration.running import (
    TIMEOUT,
    descendants,
    evidence,
    finish,
    lines,
    nothing_is_left,
    output,
    processes_of,
    run,
    serving,
    start,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.integration

STEPS = 4
COLOCATED = ["cluster.placement=colocated", "weights.pause_mode=retract", "weights.staging=stream"]
SMALL = ["rollout.batch_groups=4", "rollout.group_size=4", "eval.questions=0"]
LOGGED = ["+engine.server_args.log_level=info", "+engine.server_args.log_level_http=info"]
CONTROL = re.compile(r'"POST (/\w+) HTTP/1.1" (\d+)')
RELEASE = ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
RESUME = [
    *("/resume_memory_occupation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"),
    *("/update_weight_version", "/resume_memory_occupation", "/continue_generation"),
]
SLOW = ["trainer.micro_batch_tokens=16", "trainer.share_prompts=false"]
"""Settings with which the trainers' turn takes long enough to be hit."""


def control_calls(log: str) -> list[str]:
    """Return the control calls in an engine's log, each with success, without repetitions and checksums. An engine may
    refuse to flush while it cleans up, and is asked again (engine/update.py)."""
    found = [match.groups() for match in CONTROL.finditer(log)]
    found = [call for call in found if call != ("/flush_cache", "400")]
    assert {status for _, status in found} <= {"200"}, found
    ours = [path for path, _ in found if path in {*RELEASE, *RESUME}]
    return [path for path, _ in groupby(ours)]


def test_colocated_run_trains_the_same_weights_in_order(tmp_path: Path) -> None:
    """With bound 0 and deterministic=true the placement decides nothing but the time, also in a run that resumes."""
    common = [*SMALL, f"run.max_steps={STEPS}", "deterministic=true", "rollout.max_staleness=0", "checkpoint.every=2"]
    separate = run(tmp_path / "separate", *common)
    turns = run(tmp_path / "turns", *common, *COLOCATED, *LOGGED)
    for one, other in zip(separate, turns, strict=True):
        for name in ("reward/mean", "grad_norm", "loss/policy", "logprob_gap/mean", "staleness/max"):
            assert one.get(name) == other.get(name), name
        assert other["time/release"] > 0
        assert other["time/pause"] > other["time/train"]
    mine, theirs = tensors(tmp_path / "turns" / "hf"), tensors(tmp_path / "separate" / "hf")
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    log = (tmp_path / "turns" / "logs" / "engine-0.log").read_text()
    # at the start, with each version, and once more for the final export
    assert control_calls(log) == (RELEASE + RESUME) * (1 + STEPS + 1)
    assert log.count("Cache flushed successfully!") >= 2 + STEPS
    assert not (tmp_path / "turns" / TRAINING).exists()
    assert json.loads((tmp_path / "turns" / "summary.json").read_text())["checkpoint/failed"] == 0
    middle = CheckpointStore(tmp_path / "turns").path(STEPS // 2)
    resumed = run(tmp_path / "resumed", *common, *COLOCATED, f"resume={middle}")
    assert resumed[-1]["grad_norm"] == turns[-1]["grad_norm"]
    again = tensors(tmp_path / "resumed" / "hf")
    assert all(mine[name].equal(again[name]) for name in mine)


@pytest.mark.gpu
def test_engine_and_trainer_take_turns_on_one_gpu(tmp_path: Path) -> None:
    """What the engine released is all sent again: each publish is verified, and the first answers under its version
    have the log-probabilities that the trainer computes."""
    sizes = ["run.max_steps=3", "eval.questions=0", "engine.max_total_tokens=16384", "weights.verify_every=1"]
    on_gpu = ["trainer.device=cuda", "engine.device=cuda", "rollout.max_staleness=0"]
    steps = run(tmp_path / "run", *COLOCATED, *sizes, *on_gpu, experiment="default")
    assert all(step["time/release"] > 0 for step in steps)
    assert max(step["staleness/max"] for step in steps) == 0
    assert max(step["logprob_gap/mean"] for step in steps) < 0.05
    nothing_is_left(tmp_path / "run")


def wait_for_turn(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Wait until the trainers' next turn begins."""
    deadline = time.monotonic() + TIMEOUT
    while not (run_dir / TRAINING).exists():
        assert process.poll() is None, evidence(run_dir)
        assert time.monotonic() < deadline, evidence(run_dir)
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("engines", "number"),
    [
        pytest.param(2, signal.SIGKILL, id="one of two dies", marks=pytest.mark.campaign),
        pytest.param(2, signal.SIGSTOP, id="one of two hangs", marks=pytest.mark.campaign),
        pytest.param(1, signal.SIGKILL, id="the only one dies"),  # and engine/test_hand_over.py
    ],
)
def test_failed_engine_restarts_and_a_dead_trainer_ends_it(engines: int, number: int, tmp_path: Path) -> None:
    """One step off, two trainer ranks: the staleness stays within its bound. Without another engine, the version is
    published again. Both die in the trainers' turn."""
    run_dir = tmp_path / "run"
    shape = [f"engine.count={engines}", "trainer.data_parallel=2", "rollout.max_staleness=1", "weights.timeout=10"]
    with start(run_dir, *SMALL, *COLOCATED, *SLOW, *shape, "run.max_steps=100000") as process:
        wait_for_step(process, run_dir, 2)
        wait_for_turn(process, run_dir)
        os.killpg(processes_of(process, run_dir)[f"engine-{engines - 1}"], number)
        wait_for_step(process, run_dir, 8)
        wait_until(lambda: serving(run_dir) == engines, process, run_dir, "the engine serves again")
        assert f"engine-{engines - 1} died" in output(run_dir)
        wait_for_turn(process, run_dir)
        started = descendants(process)
        os.kill(processes_of(process, run_dir)["trainer-0"], signal.SIGKILL)
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "trainer-0 died: killed by SIGKILL" in text
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["staleness/max"] for step in steps) <= 1
    nothing_is_left(run_dir, started)
