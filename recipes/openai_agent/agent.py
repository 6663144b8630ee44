"""Example of an agent that uses only the openai package and a calculator.

experiment=openai_agent trains it through the proxy. It does not depend on asyncrl's agent API, and would run unchanged
against any endpoint with the OpenAI API.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from asyncrl.extensions.tools.calculator import calculate

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def solve(question: dict[str, Any], base_url: str, api_key: str, max_turns: int = 3) -> float:
    """Answer a question with calculator calls. Return 1.0 if the last word of the answer is correct, else 0.0."""
    messages: list[Any] = list(question["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(max_turns):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
            said = completion.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                result = _result(call.function.arguments)  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    words = str(messages[-1].get("content") or "").split()
    return float(bool(words) and words[-1].strip(".") == str(question["answer"]))


def _result(arguments: str) -> str:
    try:
        return str(calculate(str(json.loads(arguments)["expression"])))
    except (ValueError, ArithmeticError, KeyError, TypeError) as error:
        return f"error: {error}"
