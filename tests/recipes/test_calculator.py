"""The sums, and their worked examples, are what the calculator says; the calls in them are calls."""

from __future__ import annotations

import pytest

from asyncrl.extensions.tools.calculator import calculate
from asyncrl.extensions.tools.calls import parse
from asyncrl_recipes.calculator.sums import Sums


@pytest.mark.parametrize("index", [0, 1, 1 << 30])
def test_answer_is_the_calculator_s_and_nothing_else_scores(index: int) -> None:
    task = Sums()
    question = task.question(index)
    assert question == task.question(index)
    asked = question["messages"][-1]["content"].removeprefix("Calculate ").removesuffix(".")
    assert question["answer"] == calculate(asked)
    assert task.score(f" {question['answer']}\n", question) == 1.0
    assert task.score(f"It is {question['answer']}", question) == 0.0


def test_worked_examples_call_the_calculator() -> None:
    *shown, _ = Sums().question(7)["messages"]
    for asked, wrote, told, answered in zip(*[iter(shown)] * 4, strict=True):
        (call,) = parse(wrote["content"], "hermes")[1]
        assert call.name == told["name"] == "calculate"
        assert asked["content"] == f"Calculate {call.arguments['expression']}."
        assert told["content"] == answered["content"] == calculate(call.arguments["expression"])
