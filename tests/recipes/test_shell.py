"""The shell tasks: the same by number, and their checks pass for a solution and not for nothing."""

from __future__ import annotations

import json

import pytest

from asyncrl_recipes.shell.tasks import KINDS, ShellTasks
from tests.extensions.tools.shells import SANDBOX, SOLUTIONS, block, play


@pytest.mark.parametrize("index", range(2 * len(KINDS)))
def test_shipped_task_is_solved_by_its_solution_alone(index: int) -> None:
    question = ShellTasks(**SANDBOX).question(index)
    assert question == ShellTasks(**SANDBOX).question(index)
    command = SOLUTIONS[index % len(KINDS)](question["messages"][0]["content"])
    assert play("DONE", question=question)[-1].reward == 0.0
    assert play(block(command), "DONE", question=question)[-1].reward == 1.0


def test_shipped_task_tells_how_to_act_or_gives_a_tool() -> None:
    (message,) = ShellTasks(**SANDBOX).question(0)["messages"]
    assert "```bash" in message["content"]
    question = ShellTasks(format="hermes", **SANDBOX).question(0)
    assert "```bash" not in question["messages"][0]["content"]
    assert question["tools"][0]["function"]["name"] == "bash"


def test_questions_are_plain_data() -> None:
    assert json.loads(json.dumps(ShellTasks(**SANDBOX).question(4))) == ShellTasks(**SANDBOX).question(4)
