"""Wherever a user's code raises, the last ten lines of the console name the file, the line and the cause.

Engines are stubs, and so is the trainer unless the loss raises (stub_run.py); launcher and rollout process are real.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.extensions.plan.lengths import Lengths
from tests.integration.faulty_users import write_questions
from tests.integration.ranks import ROOT
from tests.integration.running import finish, start
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration
WORKLOAD = Workload(asdict(Lengths(mean=4.0, sigma=0.5, longest=8, group_size=4)), 0.002, [0.0], 0.05)
FILE = ["task=file", "task.train_file=questions.jsonl", "rollout.max_failures=20"]
USERS = """
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.algo.loss import ppo
from asyncrl.envs.env import Step

calls = 0


def reached(part):
    global calls
    calls += 1
    if part == {part!r} and calls > {after}:
        raise {error}("planted")  # here


reached("import")


def reward(answer, row):
    reached("reward")
    return float(len(answer) % 2)


class Agent(SingleTurn):
    async def run(self, prompt, generate):
        reached("agent")
        return await super().run(prompt, generate)

    async def close(self):
        print("the agent is closed", flush=True)


class Environment:
    def question(self, index):
        return {{"messages": [{{"role": "user", "content": f"{{index % 1000:03}}"}}]}}

    def reset(self, question):
        return None

    def step(self, action):
        reached("environment")
        return Step(reward=1.0, done=True)


def loss(logprobs, rows):
    reached("loss")
    return ppo(logprobs, rows)
"""
OVERRIDES = {
    "": [*FILE, "task.reward=mine:reward", "agent=mine:Agent"],
    "import": [*FILE, "task.reward=exact", "agent=mine:Agent"],
    "reward": [*FILE, "task.reward=mine:reward"],
    "agent": [*FILE, "task.reward=exact", "agent=mine:Agent"],
    "environment": [
        "task=own",
        "task.kind=mine:Environment",
        "task.environments.patience=1",
        "rollout.max_failures=20",
    ],
    "loss": [*FILE, "task.reward=exact", "algo.loss=mine:loss"],
}


def played(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int = 0, error: str = "KeyError", *more: str
) -> tuple[int, str]:
    """Run with this code, whose `part` raises after so many calls. Return exit code and output."""
    (folder / "mine.py").write_text(USERS.format(part=part, after=after, error=error))
    write_questions(folder / "questions.jsonl", 0, raises=0.0, hangs=0.0)
    for name, value in {"PYTHONPATH": str(ROOT), **WORKLOAD.environment()}.items():
        monkeypatch.setenv(name, value)
    module = "asyncrl.launch.main" if part == "loss" else "tests.integration.stub_run"
    stubs = [] if part == "loss" else ["cluster.tls=false", "weights.verify=false"]
    sizes = ["rollout.batch_groups=4", "rollout.group_size=4", "rollout.max_new_tokens=8"]
    overrides = ["run.max_steps=8", "eval.questions=0", *sizes, *stubs, *OVERRIDES[part], *more]
    with start(folder / "run", *overrides, module=module) as process:
        return finish(process, folder / "run", 120.0)


@pytest.mark.parametrize(
    ("part", "after", "error"),
    [
        ("import", 0, "KeyError"),
        ("reward", 0, "KeyError"),
        ("reward", 100, "KeyboardInterrupt"),
        ("agent", 60, "KeyError"),
        ("environment", 0, "KeyError"),
        ("environment", 4, "KeyError"),  # of each process
        ("loss", 3, "KeyError"),
    ],
)
def test_console_names_file_line_and_cause_of_a_users_error(
    part: str, after: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = played(part, tmp_path, monkeypatch, after, error)
    line = USERS[: USERS.index("# here")].count("\n") + 1
    last = "\n".join(text.splitlines()[-10:])
    assert code == (2 if part == "import" else 1), text  # what cannot be imported is refused before anything starts
    assert re.search(rf"{error}: '?planted", last), text
    assert f"{tmp_path}/mine.py:{line}" in last, text


def test_processes_that_play_are_not_blamed_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end because the rollout process does."""
    code, text = played("agent", tmp_path, monkeypatch, 0, "KeyError", "processes.count=2")
    assert code == 1, text
    assert re.search(r"rollout: .*agent_error: KeyError: 'planted'", text), text
    assert "episodes-0 died" not in text


def test_agents_are_closed_at_a_normal_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = played("", tmp_path, monkeypatch)
    assert code == 0, text
    assert (tmp_path / "run/logs/rollout.log").read_text().count("the agent is closed") == 1
