"""Tools and shells in the sandboxes of this machine: what a program does to itself is told, and nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("asyncrl.extensions.sandbox.local")

from asyncrl.extensions.tools.shared import close_shared
from asyncrl.extensions.tools.toolbox import ToolboxEnv
from asyncrl_recipes.shell.tasks import KINDS, ShellTasks
from tests.extensions.tools.shells import SOLUTIONS, block

pytestmark = pytest.mark.integration
LIMITS = {"seconds": 20.0, "cpu_seconds": 20.0, "memory_mb": 256, "output_kb": 64}


def run(script: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            async with asyncio.timeout(120):
                return await script()
        finally:
            await close_shared()

    return asyncio.run(main())


def test_programs_in_a_session_whatever_they_do() -> None:
    programs = {
        "print(6 * 7); open('f', 'w').write('kept') and None": "42",
        "open('f').read()": "'kept'",
        "print('x' * 1_000_000)": "[it printed too much]",
        "x = bytearray(1 << 30)": "[it used too much memory]",
        "import os; os.kill(os.getpid(), 9)": "[it was killed]",
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)": "[exit code 1]",
        "open('f').read() + '!'": "'kept!'",
    }

    async def script() -> None:
        env = ToolboxEnv([{"use": "python", "sandbox_params": {"limits": LIMITS}}])
        await env.reset({})
        for code, end in programs.items():
            call = json.dumps({"name": "python", "arguments": {"code": code}})
            step = await env.step(f"<tool_call>{call}</tool_call>")
            content = step.messages[0]["content"]  # type: ignore[index]
            assert content.endswith(end) or (end == "[it used too much memory]" and "MemoryError" in content), content
            assert len(content) < 10_000
        await env.close()

    run(script)


@pytest.mark.parametrize("index", range(len(KINDS)))
def test_shipped_shell_tasks_can_be_solved_there(index: int) -> None:
    async def script() -> float:
        env = ShellTasks()
        question = env.question(index)
        await env.reset(question)
        await env.step(block(SOLUTIONS[index](question["messages"][0]["content"])))
        step = await env.step("DONE")
        await env.close()
        return step.reward

    assert run(script) == 1.0
