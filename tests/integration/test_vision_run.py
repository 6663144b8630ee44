"""A whole run of a model that sees, over several turns with an image each: exact from the game to the trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from asyncrl.images import png_size
from asyncrl.inspection.cli import main
from asyncrl.records.reading import Recording
from tests.integration.running import lines, nothing_is_left, run

pytestmark = pytest.mark.integration

SMALL = [
    *("task=find_square", "task.agent_params.max_turns=3", "rollout.max_new_tokens=16", "run.max_steps=2"),
    *("rollout.batch_groups=4", "rollout.group_size=4", "eval.questions=2", "rollout.max_staleness=1"),
]
TRAINED = ("loss", "grad_norm", "entropy", "tokens/trained", "logprob_gap/mean", "reward/mean")


def weights(run_dir: Path) -> str:
    files = sorted((run_dir / "hf").glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_images_of_every_turn_reach_the_trainer_and_a_replay_is_equal_to_the_bit(tmp_path: Path) -> None:
    """The engine's log-probabilities are the trainer's, also behind the images of later turns; groups are recorded with
    each image once; and the recording alone trains the same weights."""
    live, again = tmp_path / "live", tmp_path / "again"
    steps = run(live, *SMALL, "record=true", experiment="tiny_vision")
    assert steps[0]["logprob_gap/max"] < 1e-5
    recording = Recording(live)
    groups = [group for step in recording.steps for group in recording.batch(step).groups]
    later = [turn for group in groups for one in group.trajectories for turn in one.turns[1:]]
    assert later
    assert all(len(turn.images) == 1 for turn in later)
    names = {name for group in groups for name in group.images}
    assert {png_size(png) for group in groups for png in group.images.values()} == {(56, 56)}
    assert names <= {file.stem for file in (live / "records" / "images").iterdir()}
    assert main([str(live), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert all(page.count(f'"{name}": "') == 1 for name in names)

    replayed = run(again, *SMALL, "mode=replay", f"replay.from={live}", experiment="tiny_vision")
    assert [[step[name] for name in TRAINED] for step in replayed] == [
        [step[name] for name in TRAINED] for step in steps
    ]
    assert weights(again) == weights(live)
    assert len(lines(live / "metrics.jsonl")) == 2
    nothing_is_left(again)
