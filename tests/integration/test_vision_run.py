"""Whole runs of a model that sees, over several turns with an image each: exact from the game to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.view.inspection.cli import main
from asyncrl.extensions.vision.sizes import png_size
from tests.integration.books import tensors, trained, weights
from tests.integration.running import (
    DETERMINISTIC,
    finish,
    lines,
    nothing_is_left,
    output,
    run,
    start,
    wait_for_step,
    wait_until,
)
from tests.integration.vision import ADAPTERS

pytestmark = pytest.mark.integration

GAME = (
    *("task=find_square", "task.kind=tests.integration.noted_envs:Wandering", "task.agent_params.max_turns=3"),
    *("rollout.max_new_tokens=12", "eval.questions=2"),
)
SMALL = ("run.max_steps=4", "rollout.batch_groups=4", "rollout.group_size=4")


def train(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    return run(run_dir, *GAME, *SMALL, *settings, experiment="tiny_vision")


def check_images(run_dir: Path, page: Path) -> None:
    """Check that every later turn has an image of its own, and that each image is recorded and shown once."""
    recording = Recording(run_dir)
    groups = [group for step in recording.steps for group in recording.batch(step).groups]
    later = [turn for group in groups for one in group.trajectories for turn in one.turns[1:]]
    assert later
    assert all(len(turn.images) == 1 for turn in later)
    names = {name for group in groups for name in group.images}
    assert {png_size(png) for group in groups for png in group.images.values()} == {(56, 56)}
    assert names <= {file.stem for file in (run_dir / "records" / "images").iterdir()}
    assert main([str(run_dir), "--html", str(page)]) == 0
    text = page.read_text()
    assert all(text.count(f'"{name}": "') == 1 for name in names)


def test_killed_vision_run_goes_on_and_replays(tmp_path: Path) -> None:
    """Results are equal bit for bit, with images that the game returns in later turns to two rollout processes: those
    of a run whose launcher was killed and started again, and those of the undisturbed training of its recording.
    (test_resume_environments.py compares a killed run with an undisturbed one.)"""
    killed, again = tmp_path / "killed", tmp_path / "again"
    kept = ("record=true", "resume=auto", "checkpoint.every=1", "processes.count=2", *DETERMINISTIC)
    with start(killed, *GAME, *SMALL, *kept, experiment="tiny_vision") as launcher:
        wait_for_step(launcher, killed, 1)
        wait_until(lambda: bool(CheckpointStore(killed).versions()), launcher, killed, "a checkpoint")
        launcher.kill()  # its children die with it
        finish(launcher, killed)
    assert len(lines(killed / "metrics.jsonl")) < 4
    steps = train(killed, *kept)
    assert "resuming from" in output(killed)
    nothing_is_left(killed)
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert max(step["logprob_gap/max"] for step in steps) < 1e-5
    assert len({step["reward/mean"] for step in steps}) > 2  # its answers are no constant
    replayed = train(again, *DETERMINISTIC, "mode=replay", f"replay.from={killed}")
    assert trained(steps) == trained(replayed)
    assert weights(killed) == weights(again)
    check_images(killed, tmp_path / "page.html")


@pytest.mark.campaign  # test_vision_engine.py asks an engine for both adapters
def test_two_roles_read_images_with_an_adapter_each_and_train_it(tmp_path: Path) -> None:
    """Every batch is on policy: with the adapter of the other role, log-probabilities would differ."""
    adapters = ("trainer.lora.rank=4", "rollout.max_staleness=0", "agent=tests.integration.roles:two_that_see")
    roles = ("+agents.roles.writer.adapter=policy", "+agents.roles.checker.adapter=second")
    steps = run(tmp_path / "run", *SMALL, *adapters, *roles, "eval.questions=2", experiment="tiny_vision")
    assert max(one["logprob_gap/max"] for one in steps) < 1e-5
    assert all(one["grad_norm"] > 0 for one in steps)
    first, second = (tensors(tmp_path / "run/hf" / name) for name in ADAPTERS)
    assert not any(first[name].equal(second[name]) for name in first)
