"""Whatever is killed at any time, the same command resumes the run, and the results show no interruption.

The recording proves it: trained again without engines and interruptions, it gives the same losses, gradient norms and
weights bit for bit. Its schedule, repeated by a buffer that was never saved, gives the same tickets, batches and
ledgers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.extensions.convert.cli import main as convert
from tests.integration.books import check_books, check_replay, tensors, trained, weights
from tests.integration.running import (
    DETERMINISTIC,
    RUN,
    STEPS,
    Blow,
    finish,
    go_on_to_the_end,
    lines,
    run,
    start,
    wait_for_step,
)

pytestmark = pytest.mark.integration

VICTIMS = ["everything", "trainer", "rollout"]


@pytest.mark.campaign  # test_resume_environments.py makes the same comparison for a game
def test_killed_deterministic_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Engines repeat the same tokens, from their own seeds, so steps and weights are equal bit for bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run(whole, *RUN, *DETERMINISTIC)
    Blow("everything", 3, 0.2).strike(killed, *DETERMINISTIC)
    assert len(lines(killed / "metrics.jsonl")) < STEPS
    go_on_to_the_end(killed, *DETERMINISTIC)
    check_books(killed)
    assert trained(lines(killed / "metrics.jsonl")) == trained(expected)
    assert weights(killed) == weights(whole)
    assert len({step["reward/mean"] for step in expected}) > 3  # its answers are no constant


def check_conversion(run_dir: Path, tmp_path: Path) -> None:
    """Check that the last checkpoint holds the weights that the run exported."""
    model = json.loads((run_dir / "addresses.json").read_text())["model"]
    policy = CheckpointStore(run_dir).path(STEPS) / "policy"
    assert convert(["to-hf", str(policy), str(tmp_path / "converted"), "--model", model]) == 0
    held, exported = tensors(tmp_path / "converted"), tensors(run_dir / "hf")
    assert held.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in held.items())


def test_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The rollout process is killed after a checkpoint. Episodes are played by two processes, and then by three, one of
    which is killed: its groups are played anew. The run keeps the plan that it was started with."""
    layout, run_dir = ["trainer.data_parallel=2"], tmp_path / "run"
    planned = [*layout, "plan.apply=auto"]
    Blow("rollout", 5, 0.15).strike(run_dir, *planned, "processes.count=2")
    assert len(lines(run_dir / "metrics.jsonl")) < STEPS
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["kept"] == ["rollout.lead", "trainer.data_parallel"]
    (run_dir / "plan.json").write_text(json.dumps(plan | {"devices": "other devices"}))
    newest = max(CheckpointStore(run_dir).versions())
    text = go_on_to_the_end(run_dir, *planned, "processes.count=3", victim="episodes-1", step=newest + 2)
    assert "episodes-1 died (killed by SIGKILL" in text
    assert "process" not in json.loads((run_dir / "summary.json").read_text())["ledger"]["groups"]["rejected"]
    assert f"resuming from {CheckpointStore(run_dir).path(newest)}" in text
    assert "plan for other devices: engine.count=1" in text
    assert f"plan               predicted {plan['prediction']['samples_per_s']:.3g} samples/s" in text
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *layout)
    check_conversion(run_dir, tmp_path)
    # a run of its own, from its last checkpoint but one, in another layout
    fork = [one for one in RUN if not one.startswith("resume")]
    fork += [f"resume={CheckpointStore(run_dir).path(STEPS - 2)}", "trainer.tensor_parallel=2"]
    steps = run(tmp_path / "fork", *fork)
    assert trained(steps[: STEPS - 2]) == trained(lines(run_dir / "metrics.jsonl")[: STEPS - 2])
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))


def test_run_that_is_asked_to_stop_goes_on_from_there(tmp_path: Path) -> None:
    """It is asked between two checkpoints, and writes one at once."""
    run_dir = tmp_path / "run"
    with start(run_dir, *RUN) as launcher:
        wait_for_step(launcher, run_dir, 3)
        launcher.send_signal(signal.SIGUSR1)
        code, text = finish(launcher, run_dir)
    assert code == os.EX_TEMPFAIL, text
    assert max(CheckpointStore(run_dir).versions()) == len(lines(run_dir / "metrics.jsonl")) < STEPS
    go_on_to_the_end(run_dir)
    check_books(run_dir)
    check_replay(run_dir, tmp_path)


def test_run_that_publishes_beside_training_goes_on_as_well(tmp_path: Path) -> None:
    """The trainer is killed with a version in flight. Two stages send in turn."""
    settings = ["weights.overlap=true", "weights.transport=distributed", "trainer.batch_parts=2"]
    settings, run_dir = [*settings, "trainer.pipeline_parallel=2"], tmp_path / "run"
    Blow("trainer", 5, 0.05).strike(run_dir, *settings)
    assert len(lines(run_dir / "metrics.jsonl")) < STEPS
    go_on_to_the_end(run_dir, *settings)
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *settings)


@pytest.mark.campaign
def test_run_goes_on_in_other_layouts_and_from_a_copy(tmp_path: Path) -> None:
    """TP1 x PP2 -> TP2 x PP1, two engines -> DP2: the steps are the same up to the order of sums."""
    first = tmp_path / "run"
    stop = ["run.max_steps=6"]
    run(first, *[one for one in RUN if not one.startswith("run.max")], *stop, "trainer.pipeline_parallel=2")
    shutil.copytree(first / "checkpoints/00000004", tmp_path / "moved")  # a checkpoint is a folder like any other
    second = tmp_path / "second"
    settings = [one for one in RUN if not one.startswith(("resume", "run.max"))]
    steps = run(second, *settings, "run.max_steps=8", f"resume={first}", "trainer.tensor_parallel=2", "engine.count=2")
    assert [step["version"] for step in steps] == list(range(1, 9))
    assert trained(steps[:6]) == trained(lines(first / "metrics.jsonl"))
    third = run(
        tmp_path / "third", *settings, "run.max_steps=7", f"resume={tmp_path / 'moved'}", "trainer.data_parallel=2"
    )
    assert [step["version"] for step in third] == [5, 6, 7]
    # the recorded answers of the first run, trained from its checkpoint in the layout of the third
    again = [*[one for one in settings if not one.startswith(("record", "checkpoint"))], "mode=replay"]
    replayed = run(
        tmp_path / "replayed", *again, f"replay.from={first}", f"resume={tmp_path / 'moved'}", "trainer.data_parallel=2"
    )
    assert [step["version"] for step in replayed] == [5, 6]
    for mine, theirs in zip(replayed, lines(first / "metrics.jsonl")[4:6], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("trial", range(int(os.environ.get("ASYNCRL_TRIALS", "4"))))
def test_any_number_of_deaths_at_any_moment(trial: int, tmp_path: Path) -> None:
    """One to three kills at any time between start and end, including before the first checkpoint."""
    draw = random.Random(trial)
    layout = draw.choice([[], ["trainer.data_parallel=2"], ["trainer.tensor_parallel=2"], ["engine.count=2"]])
    run_dir = tmp_path / "run"
    told = []
    for _ in range(draw.randint(1, 3)):
        done = len(lines(run_dir / "metrics.jsonl"))
        step = draw.randint(0, STEPS - 1)
        blow = Blow(
            draw.choice(VICTIMS), step, draw.uniform(0.0, 0.4 if step else 12.0)
        )  # steps take 0.2 s, starting 12
        if blow.step >= done:
            blow.strike(run_dir, *layout)
            at, kept = len(lines(run_dir / "metrics.jsonl")), CheckpointStore(run_dir).versions()[-1:]
            told.append(f"{blow.victim} at {at}, from {kept}")
    go_on_to_the_end(run_dir, *layout)
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *layout)
    print(f"trial {trial}: {' '.join(layout) or 'single'}: {'; '.join(told) or 'no death'}; the rest bit for bit")
