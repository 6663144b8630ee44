"""The tutorials run to their end, and what they show is true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.run_notebooks import execute
from tests.integration.books import balanced, groups_of
from tests.integration.running import lines, nothing_is_left

pytestmark = pytest.mark.integration
TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands of the notebooks import this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TUTORIALS.parents[1]), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.campaign  # test_ends.py holds that a run learns, test_agents.py trains with a module of a user
def test_reward_of_a_module_beside_the_questions_is_learned(tmp_path: Path) -> None:
    """The installed command finds the module in the current folder."""
    execute(TUTORIALS / "your_model_data_and_reward.ipynb", tmp_path)
    rewards = [step["reward/mean"] for step in lines(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.05
    nothing_is_left(tmp_path / "run")


@pytest.mark.campaign  # test_experiments.py trains on games, test_agents.py with environments of a user
def test_environment_of_twenty_lines_trains(tmp_path: Path) -> None:
    execute(TUTORIALS / "a_game.ipynb", tmp_path)
    run_dir = tmp_path / "run"
    assert len(lines(run_dir / "metrics.jsonl")) == 24
    assert balanced(run_dir).groups.rejected == {}
    groups = groups_of(run_dir)
    assert {1, 2} <= {len(t.turns) for g in groups for t in g.trajectories} <= {1, 2, 3, 4}
    for trajectory in (t for g in groups for t in g.trajectories):
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            ended = before.completion.token_ids[-1] == 10
            assert turn.observation in ([[0, 11], [1, 11]] if ended else [[10, 0, 11], [10, 1, 11]])
    nothing_is_left(run_dir)


def test_tools_are_explained_without_a_run(tmp_path: Path) -> None:
    *_, settings = execute(TUTORIALS / "tools.ipynb", tmp_path)
    assert "my_tools:weather" in settings


@pytest.mark.parametrize("name", ["your_agent", "debug_a_bad_run"])
@pytest.mark.campaign  # test_agents.py trains an agent, test_replay.py replays to the bit
def test_other_tutorials_run_to_their_end(name: str, tmp_path: Path) -> None:
    execute(TUTORIALS / f"{name}.ipynb", tmp_path)
