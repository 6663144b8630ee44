"""Python as a tool: the model's programs run in a sandbox (asyncrl/extensions/sandbox) with limits.

A program is like a notebook cell: the model sees what it prints, and the value of its last line if that is an
expression. In a `session` files stay for the episode; variables do not. Failures of the program, and exceeded limits,
are reported to the model; only a failure of the sandbox itself is a fault.

waits for     its turn if calls share a session; a sandbox; the program, whose time the sandbox bounds
on a hang     EpisodeFailed("sandbox"), from the sandbox
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.extensions.tools.output import shown
from asyncrl.extensions.tools.tool import Schema, ToolError

if TYPE_CHECKING:
    from asyncrl.extensions.sandbox.protocol import Sandbox, SandboxBackend

RUNNER = """
import ast, sys
source = sys.stdin.buffer.read().decode()
scope = {"__name__": "__main__", "__builtins__": __builtins__}
try:
    tree = ast.parse(source, "<program>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), scope)
        if value is not None:
            print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    import linecache, traceback

    linecache.cache["<program>"] = (len(source), None, source.splitlines(True), "<program>")
    sys.stdout.flush()
    traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    sys.exit(1)
"""
"""Wrapper that runs in the sandbox; the program arrives on stdin."""


class PythonTool:
    """The sandboxes of one episode."""

    name = "python"
    description = (
        "Runs a Python program and returns what it prints, and the value of its last line if that is an expression. "
        "Files in the current folder stay between calls; variables do not."
    )
    parameters: ClassVar[Schema] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program"}},
        "required": ["code"],
        "additionalProperties": False,
    }
    timeout = math.inf  # the sandbox limits the time of a program; the wait for its turn does not count

    def __init__(
        self,
        sandboxes: Callable[[], SandboxBackend],
        *,
        seconds: float | None = None,
        session: bool = True,
        output_chars: int = 4000,
    ) -> None:
        """Configure the tool. `seconds` bounds one program (unset: the sandbox's limit). In a `session` all programs of
        the episode share one sandbox; otherwise each has a new one."""
        self._sandboxes, self._seconds, self._session = sandboxes, seconds, session
        self._output_chars = output_chars
        self._sandbox: Sandbox | None = None
        self._turn = asyncio.Lock()

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return what the program printed and how it ended. Raises ToolError for a program that is too long."""
        code = arguments["code"].encode(errors="replace")
        if not self._session:
            sandbox = await self._sandboxes().open()
            try:
                return await self._run(sandbox, code)
            finally:
                await sandbox.close()
        async with self._turn:
            if self._sandbox is None:
                self._sandbox = await self._sandboxes().open()
            return await self._run(self._sandbox, code)

    async def close(self) -> None:
        """Remove the session's sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox:
            await sandbox.close()

    async def _run(self, sandbox: Sandbox, code: bytes) -> str:
        try:
            outcome = await sandbox.run(["python", "-c", RUNNER], stdin=code, seconds=self._seconds)
        except ValueError as error:  # the program is larger than file_mb
            raise ToolError(str(error)) from None
        return shown(outcome, self._output_chars)
