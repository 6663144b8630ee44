"""Engines without trainers fill a recording, which trainers can train later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.running import nothing_is_left, run

pytestmark = pytest.mark.integration

SMALL = ["run.max_steps=6", "eval.questions=8", "rollout.batch_groups=4", "rollout.group_size=8"]


def test_engines_alone_fill_a_recording_that_trainers_then_train(tmp_path: Path) -> None:
    """Engines keep their weights while versions are published; the trained staleness is that of the labels."""
    alone = tmp_path / "alone"
    steps = run(alone, *SMALL, "mode=rollout_only", "record=true")
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert "loss" not in steps[0]
    assert max(step["staleness/max"] for step in steps) <= 2
    assert {log.stem for log in (alone / "logs").iterdir()} == {"engine-0", "router", "rollout", "collect"}
    nothing_is_left(alone)
    replayed = run(tmp_path / "trained", *SMALL, "mode=replay", f"replay.from={alone}")
    assert [step["reward/mean"] for step in replayed] == [step["reward/mean"] for step in steps]
    assert replayed[0]["logprob_gap/max"] < 1e-4  # the weights that wrote it
    assert replayed[-1]["logprob_gap/max"] > 1e-3
