"""Runs that are killed while environments live in processes resume with new environments, and leave none of the old."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.extensions.recording.events import Committed, unpacked
from asyncrl.extensions.recording.reader import Recording
from asyncrl.rollout import snapshot
from tests.integration.books import check_books, trained, weights
from tests.integration.noted_envs import TURNS
from tests.integration.running import (
    DETERMINISTIC,
    GROUP,
    RUN,
    Blow,
    go_on_to_the_end,
    lines,
    pids_carrying,
    run,
    start,
    wait_for_step,
)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder where environments record the episodes that they begin, in a file per process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def game(notes: Path, seconds: float) -> list[str]:
    """Return the settings of a multi-turn game in processes, some of which start ahead of time."""
    return [
        *("task=own", "task.kind=tests.integration.noted_envs:Noted", "task.name=noted", "rollout.max_new_tokens=8"),
        *(f"+task.params.folder={notes}", f"+task.params.seconds={seconds}"),
        *("task.environments.hosted=true", "task.environments.warm=4"),
    ]


def episodes(files: Iterable[Path]) -> Counter[int]:
    """Return the number of episodes that were begun, by question."""
    return Counter(int(line) for file in files for line in file.read_text().splitlines())


@pytest.mark.campaign  # the next test kills more
def test_groups_under_way_are_played_anew_without_loss(tmp_path: Path, notes: Path) -> None:
    """The environment is deterministic, so every answer of the first run occurs again in the second."""
    run_dir, settings = tmp_path / "run", game(notes, 0.02)
    Blow("rollout", 5, 0.15).strike(run_dir, *settings)
    first = set(notes.iterdir())
    checkpoint = CheckpointStore(run_dir).path(max(CheckpointStore(run_dir).versions()))
    groups = snapshot.decode((checkpoint / ROLLOUT).read_bytes()).service.outstanding
    said = sum(len(one.said) for group in groups for one in group.siblings)
    assert said, "the checkpoint holds no group that is being played"
    go_on_to_the_end(run_dir, *settings)
    check_books(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["ledger"]["tokens"]["discarded"] == 0
    before, after = episodes(first), episodes(set(notes.iterdir()) - first)
    for group in groups:
        index = group.prompt.index
        assert after[index] == GROUP
        assert before[index] == GROUP or not any(one.said for one in group.siblings)
    committed = [unpacked(event.group) for event in Recording(run_dir).events() if isinstance(event, Committed)]
    assert {len(one.turns) for group in committed for one in group.trajectories} == set(range(1, TURNS + 1))


@pytest.mark.integration
def test_run_whose_launcher_was_killed_is_the_run_that_was_not(tmp_path: Path, notes: Path) -> None:
    """Results are equal bit for bit.

    The kernel ends the environments' processes, and the resumed run ends what these had started.
    """
    steps, whole, killed = 6, tmp_path / "whole", tmp_path / "killed"
    settings = [*DETERMINISTIC, *game(notes, 0.0), f"run.max_steps={steps}"]
    expected = run(whole, *RUN, *settings)
    earlier = set(notes.iterdir())
    with start(killed, *RUN, *settings) as launcher:
        wait_for_step(launcher, killed, 3)
        launcher.kill()
    assert len(lines(killed / "metrics.jsonl")) < steps
    hosts = {int(file.name) for file in set(notes.iterdir()) - earlier}
    first = json.loads((killed / "addresses.json").read_text())["run_id"]
    deadline = time.monotonic() + 60
    while left := hosts.intersection(pids_carrying(first)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert pids_carrying(first), "its environments had no programs"
    go_on_to_the_end(killed, *settings)
    assert pids_carrying(first) == []
    check_books(killed, steps)
    assert trained(lines(killed / "metrics.jsonl")) == trained(expected)
    assert weights(killed) == weights(whole)
    assert len({step["reward/mean"] for step in expected}) > 3  # its answers are no constant
