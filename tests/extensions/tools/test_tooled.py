"""A task with tools is that task, but for the tools that its questions carry and the environment that plays it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.toolbox import ToolboxEnv
from asyncrl.extensions.tools.tooled import Tooled

DOUBLE = {"use": "tests.extensions.tools.own:double"}


class Numbers:
    size, inline, held_out = 7, True, 2

    def question(self, index: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(index)}], "answer": str(index)}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return float(answer == question["answer"])

    def correct(self, reward: float) -> bool:
        return reward >= 0.5


def test_questions_carry_the_tools_and_the_score_is_the_task_s() -> None:
    plain, task = Numbers(), Tooled(Numbers(), [DOUBLE], {"format": "pythonic", "max_calls": 3})
    question = task.question(4)
    assert question == {**plain.question(4), "tools": question["tools"], "tool_format": "pythonic"}
    assert [tool["function"]["name"] for tool in question["tools"]] == ["double"]
    assert (task.score("4", question), task.score("5", question)) == (1.0, 0.0)
    assert (task.size, task.inline, task.held_out, task.correct(0.5)) == (7, True, 2, True)


def test_environment_is_made_from_names_with_its_options() -> None:
    task = Tooled(Numbers(), [DOUBLE], {"format": "pythonic"})
    env = task.environment.make()
    assert isinstance(env, ToolboxEnv)
    assert env.format == "pythonic"
    assert task.environment.waits


@pytest.mark.parametrize(
    ("tools", "options", "field"),
    [
        ([{"use": "perl"}], {}, "tasks.n.tools.0.use"),
        ([DOUBLE, DOUBLE], {}, "tasks.n.tools"),
        ([DOUBLE], {"max_call": 3}, "tasks.n.tool_options"),
        ([DOUBLE], {"format": "xml"}, "tasks.n.tool_options.format"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(tools: Any, options: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tooled(Numbers(), tools, options, "tasks.n")
    assert caught.value.field == field


def test_task_with_its_own_environment_takes_no_tools() -> None:
    class Game(Numbers):
        environment = object()

    with pytest.raises(ConfigError, match=r"task.tools: .* has its own environment"):
        Tooled(Game(), [DOUBLE])
