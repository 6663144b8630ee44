"""Sums that are too hard for a small model but not for a calculator: a task to be answered with tools.

Each question is preceded by worked examples that call `calculate` (asyncrl/extensions/tools/calculator.py) in hermes
format. With them SmolLM2 calls it in about two of five samples at temperature 1; without them it does not.
"""

from __future__ import annotations

import json
import random
from typing import Any

from asyncrl.schema import Message

EXAMPLES = (("12 + 7 * 9", 75), ("31 + 45 * 8", 391))


class Sums:
    """Task of sums: task.kind=asyncrl_recipes.calculator.sums:Sums, with task.tools."""

    size, inline = None, True

    def question(self, index: int) -> dict[str, Any]:
        """Return a sum; the same index always gives the same numbers."""
        draw = random.Random(index)
        a, b, c = draw.randrange(10, 100), draw.randrange(10, 100), draw.randrange(2, 20)
        shown = [message for sum_, value in EXAMPLES for message in _worked(sum_, value)]
        return {"messages": [*shown, _asked(f"{a} + {b} * {c}")], "answer": str(a + b * c)}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        """Return 1 if the answer is the number and nothing else."""
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
