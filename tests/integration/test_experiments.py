"""Every experiment that is not sized for GPUs, and every shipped agent, plays and trains on the real engine.

Their tasks share a run, each with the settings of its experiment. The small model outputs digits: it plays games,
and never calls a tool.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.schema import Group
from tests.fakes import compose_values
from tests.integration.books import balanced, groups_of
from tests.integration.running import lines, nothing_is_left, run
from tests.integration.speaker import write_speaker

pytestmark = pytest.mark.integration

EXPERIMENTS = ("calculator", "code", "game", "judge", "math", "openai_agent", "self_play", "shell", "tiny_game")
DIGITS = [*"0123456789", "\n"]
SIZES = ("run.max_steps=3", "rollout.group_size=2", "rollout.max_new_tokens=24", "record=true", "eval.questions=2")
SPEAKER = ("engine.max_total_tokens=32768", "engine.max_running_requests=64", "trainer.optimizer.lr=1e-5")
HINT = '''
def hint(question, chat):
    """What the last answer was is known to the guide."""
    return f"Not {chat[-2]['content']!r}." if len(chat) > 1 else "Answer with one digit."
'''


def of_experiment(name: str) -> dict[str, Any]:
    """Return an experiment's task with its agent, and its further evaluation sets."""
    values = compose_values(f"experiment={name}")
    task = dict(values["task"], group_size=8 if name == "judge" else None)  # four groups, whose votes are by chance
    if task["agent"] is None and values["agent"] != compose_values()["agent"]:
        task |= {"agent": values["agent"], "agent_params": values["agent_params"]}
    return {"tasks": {name: task}, "eval": {"sets": values["eval"]["sets"]}}


def write_mixture(folder: Path, *parts: dict[str, Any]) -> tuple[str, ...]:
    """Return the arguments for a run of all these parts, which Hydra finds in a separate folder."""
    (folder / "mixture").mkdir(parents=True)
    text = OmegaConf.to_yaml(OmegaConf.merge(*parts))
    (folder / "mixture" / "all.yaml").write_text(f"# @package _global_\n{text}")
    return (f"hydra.searchpath=[file://{folder}]", "+mixture=all")


def by_task(run_dir: Path) -> dict[str, list[Group]]:
    """Return the committed groups of each task."""
    found = defaultdict(list)
    for group in groups_of(run_dir):
        found[group.task].append(group)
    return dict(found)


def turns_of(groups: list[Group]) -> list[int]:
    """Return the number of turns of each episode."""
    return [len(trajectory.turns) for group in groups for trajectory in group.trajectories]


def roles_of(groups: list[Group]) -> set[str]:
    """Return the roles of all turns."""
    return {turn.role for group in groups for trajectory in group.trajectories for turn in trajectory.turns}


def of_recipes() -> dict[str, Any]:
    """Return a game for each agent of the recipes: guided attempts, notes in the place of a context that is full, and
    ways that begin in one context."""
    game = compose_values("experiment=tiny_game")["task"]
    agents = {
        "guided": {"guide": "guides:hint", "tries": 2, "max_turns": 4},
        "memory": {"context_tokens": 0, "note_tokens": 4, "max_turns": 4},
        "forking": {"fork_at": [0, 1], "branches": 2, "max_turns": 4},
    }
    more = {"group_size": 4, "weight": 2.0}
    return {
        name: {**game, **more, "agent": f"asyncrl_recipes.{name}.agent:{name.title()}", "agent_params": params}
        for name, params in agents.items()
    }


def test_every_experiment_and_agent_trains_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guides.py").write_text(HINT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_speaker(tmp_path / "model", DIGITS, ends=0.5)
    write_speaker(tmp_path / "judge", ["yes", "no", " yes", " no"], ends=0.1)
    judge, recipes = compose_values("experiment=judge")["judge"], of_recipes()
    parts = (*map(of_experiment, EXPERIMENTS), {"judge": judge, "tasks": recipes})
    run_dir = tmp_path / "run"
    steps = run(
        run_dir,
        *(*write_mixture(tmp_path / "conf", *parts), *SIZES, *SPEAKER, f"model.path={tmp_path / 'model'}"),
        *(f"judge.model={tmp_path / 'judge'}", "judge.dtype=float32", "judge.max_total_tokens=8192"),
        *("rollout.batch_groups=24", "rollout.max_failures=1", "algo.advantage=turn_loo"),
    )
    played = by_task(run_dir)
    assert played.keys() == {*EXPERIMENTS, *recipes}
    assert balanced(run_dir).groups.rejected == {}
    assert sum(step["proxy/turns"] for step in steps) > 0
    rewards = {
        name: {round(t.total, 3) for group in groups for t in group.trajectories} for name, groups in played.items()
    }
    assert rewards["judge"] <= {0.0, 0.5, 1.0}
    assert len(rewards["judge"]) > 1, "two votes of each judge are yes and no by chance"
    games = [*played["game"], *played["self_play"], *played["tiny_game"]]
    assert max(turns_of(games)) > 1, "one move in four is valid"
    assert "player-0" in roles_of(played["self_play"]) <= {"player-0", "player-1"}
    assert {"", "guided"} <= roles_of(played["guided"]) <= {"", "guided", "guided2"}
    notes = [t for group in played["memory"] for t in group.trajectories if len(t.turns) > 2]
    assert notes, "some episode went on behind its notes"
    assert min(turns_of(played["forking"])) >= 3, "every trunk has two more ways from its first turn"
    assert all(json.dumps(step["loss"]) != "NaN" for step in steps)
    evaluated = lines(run_dir / "eval.jsonl")
    sets = {"mbpp", "gsm8k", "nim_expert"}
    assert {line["set"] for line in evaluated} == sets | played.keys()
    assert all((line["questions"], line["failed"]) == (2, 0) for line in evaluated)
    assert {line["version_max"] for line in evaluated} == {0, 3}
    nothing_is_left(run_dir)
