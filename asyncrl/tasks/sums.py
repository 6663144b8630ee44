"""Sums that are beyond a small model's head and not beyond a calculator: a task to be answered with tools.

Worked examples, in which `calculate` (asyncrl/envs/tools/calculator.py) is called in the form of hermes, stand before
each question: with them SmolLM2 calls it in about two of five samples at temperature 1, without them it does not.
"""

from __future__ import annotations

import json
import random
from typing import Any

from asyncrl.types import Message

EXAMPLES = (("12 + 7 * 9", 75), ("31 + 45 * 8", 391))


class Sums:
    """task.kind=asyncrl.tasks.sums:Sums, with task.tools."""

    size, inline = None, True

    def question(self, index: int) -> dict[str, Any]:
        """Same index, same numbers."""
        draw = random.Random(index)
        a, b, c = draw.randrange(10, 100), draw.randrange(10, 100), draw.randrange(2, 20)
        shown = [message for sum_, value in EXAMPLES for message in _worked(sum_, value)]
        return {"messages": [*shown, _asked(f"{a} + {b} * {c}")], "answer": str(a + b * c)}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        """1 for the number and nothing else."""
        return float(answer.strip() == question["answer"])


def _asked(sum_: str) -> Message:
    return {"role": "user", "content": f"Calculate {sum_}."}


def _worked(sum_: str, value: int) -> list[Message]:
    call = json.dumps({"name": "calculate", "arguments": {"expression": sum_}})
    return [
        _asked(sum_),
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "name": "calculate", "content": str(value)},
        {"role": "assistant", "content": str(value)},
    ]
