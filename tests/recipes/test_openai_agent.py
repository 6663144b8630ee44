"""The example agent: it calls its calculator, reads the result, and rewards its last answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl_recipes.openai_agent.agent import TOOL, solve
from tests.recipes.endpoints import endpoint, saying

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}


def calling(arguments: str) -> tuple[int, Any]:
    call = {"id": "call-1", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return saying(None, tool_calls=[call])


def run(*answers: tuple[int, Any], **params: Any) -> tuple[float, list[Any]]:
    """Return the reward and the bodies of the requests."""
    script: Iterator[tuple[int, Any]] = iter(answers)

    async def main(url: str) -> float:
        async with asyncio.timeout(20):
            return await solve(QUESTION, url, "key", **params)

    with endpoint(lambda _: next(script)) as (url, asked):
        reward = asyncio.run(main(url))
    return reward, [body for _, body in asked]


def test_result_of_the_tool_is_read_before_the_answer() -> None:
    reward, (first, second) = run(calling(json.dumps({"expression": "6 * 7"})), saying("It is 42."))
    assert reward == 1.0
    assert (first["messages"], first["tools"]) == (QUESTION["messages"], [TOOL])
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "42"}


@pytest.mark.parametrize("arguments", ["{", "[]", "{}", json.dumps({"expression": "1 / 0"})])
def test_call_that_is_wrong_is_answered_with_its_error(arguments: str) -> None:
    _, (_, second) = run(calling(arguments), saying("42"))
    assert second["messages"][-1]["content"].startswith("error: ")


@pytest.mark.parametrize(("answer", "reward"), [("It is 42.", 1.0), ("42 it is", 0.0), ("", 0.0), (None, 0.0)])
def test_last_word_is_rewarded(answer: str | None, reward: float) -> None:
    assert run(saying(answer))[0] == reward


def test_answers_are_limited_and_a_call_is_no_answer() -> None:
    call = calling(json.dumps({"expression": "1"}))
    reward, asked = run(call, call, max_turns=2)
    assert (reward, len(asked)) == (0.0, 2)
