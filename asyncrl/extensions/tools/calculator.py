"""A calculator as an MCP server over stdio: python -m asyncrl.extensions.tools.calculator

It evaluates bounded arithmetic only: no names but FUNCTIONS, at most MOST_CHARACTERS, no integer beyond MOST_BITS.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

Number = int | float

MOST_CHARACTERS = 400
MOST_BITS = 4096
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": math.gcd,
    "lcm": math.lcm,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


DESCRIPTION = (
    "The value of an expression of numbers, + - * / // % ** and parentheses, and of the functions "
    f"{', '.join(FUNCTIONS)}, such as 2 * (3 + 4) ** 2."
)


def calculate(expression: str) -> str:
    """Return the value of an expression as Python prints it. Raises ValueError and ArithmeticError."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters; {MOST_CHARACTERS} are allowed")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no expression: {getattr(error, 'msg', None) or error}") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return _bounded(_BINARY[type(node.op)](left, right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return _bounded(FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args)))
    raise ValueError(f"no arithmetic: {ast.unparse(node)}")


def _bounded(value: Any) -> Number:
    if isinstance(value, int):
        _check_bits(value.bit_length())
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"{value} is no finite real number")


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise ValueError(f"a number of more than {MOST_BITS} bits")


def main() -> None:
    """Serve until stdin ends."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("calculator", log_level="ERROR")

    @server.tool(name="calculate", description=DESCRIPTION)
    async def tool(expression: str) -> str:
        try:
            return calculate(expression)
        except (ValueError, ArithmeticError) as error:
            raise ToolError(str(error)) from None

    server.run()


if __name__ == "__main__":
    main()
