"""Programs that are made up: the same by number, and their asserts hold for what they ask."""

from __future__ import annotations

import random

import pytest

from asyncrl_recipes.code.programs import ASSERTS, KINDS, Programs


@pytest.mark.parametrize("index", range(len(KINDS) * 3))
def test_asserts_hold_for_what_is_asked_alone(index: int) -> None:
    question = Programs().question(index)
    assert question == Programs().question(index)
    assert len(question["test_list"]) == ASSERTS
    assert question["test_list"][0] in question["messages"][0]["content"]
    program = KINDS[index % len(KINDS)](random.Random(index))
    for test in question["test_list"]:
        exec(test, {"f": program.does})
    with pytest.raises(AssertionError):
        exec("\n".join(question["test_list"]), {"f": lambda argument: None})


def test_programs_differ() -> None:
    asked = [Programs().question(index)["messages"][0]["content"] for index in range(100)]
    assert len(set(asked)) == 100
