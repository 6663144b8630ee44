"""A calculator computes, within bounds that no expression leaves, and is served as any MCP server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.tools.calculator import MOST_BITS, calculate
from asyncrl.extensions.tools.mcp_tools import McpServers, McpSpec
from asyncrl.extensions.tools.tool import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4) ** 2", "98"),
        (" 7 // 2 + 7 % 4 - -1 ", "7"),
        ("1 / 4", "0.25"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + max(1, 2, abs(-3))", "7.0"),
        ("gcd(12, 18) * lcm(4, 6)", "72"),
        ("1.5e3", "1500.0"),
    ],
)
def test_arithmetic_is_python_s(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1 +", "x", "True", "1j", "'a'", "[1]", "1 if 1 else 2", "lambda: 1", "1 < 2", "~1", "1 << 2", "\x00"),
        *("__import__('os')", "abs.__class__", "sqrt(x=1)", "round('a')", "max()", "(1)(2)", "(abs)(lambda: 1)"),
        *(
            "9**9**9",
            "2**5000",
            "10**1000 * 10**1000",
            "1e308 * 10",
            "1e999",
            "(-8) ** 0.5",
            "sqrt(-1)",
            "floor(1e999)",
        ),
        *("(" * 150 + "1" + ")" * 150 + "+", "1" * 401),
    ],
)
def test_what_is_no_bounded_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


def test_division_by_zero_is_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        calculate("1 / 0")


pieces = st.sampled_from(["1", "9", "-", "+", "*", "**", "//", "%", "/", "(", ")", ".", "e", "sqrt(", "max(", ","])


@given(st.lists(pieces, max_size=40).map("".join))
def test_no_expression_takes_long_or_raises_otherwise(expression: str) -> None:
    with suppress(ValueError, ArithmeticError):
        assert len(calculate(expression)) <= 0.302 * MOST_BITS + 3


@pytest.mark.integration
def test_it_is_served_as_a_tool() -> None:
    async def main() -> None:
        servers = McpServers(McpSpec(use="mcp", command=["python", "-m", "asyncrl.extensions.tools.calculator"]))
        async with asyncio.timeout(60):
            tools: list[Any] = list(await servers.episode("tools.0"))
            assert [tool.name for tool in tools] == ["calculate"]
            assert await tools[0].call({"expression": "6 * 7"}) == "42"
            with pytest.raises(ToolError, match="division by zero"):
                await tools[0].call({"expression": "1 / 0"})
            with pytest.raises(ToolError, match="more than 4096 bits"):
                await tools[0].call({"expression": "9**9**9"})
            await servers.close()

    asyncio.run(main())
