"""SystemExit in a task is an error of that task.

An event loop ends, and with it the process, when one of its tasks raises SystemExit. In this process those are also a
user's: an agent, a reward, an environment, and what they start beside themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Exited(Exception):
    """Somebody's code called sys.exit."""


def contain(loop: asyncio.AbstractEventLoop) -> None:
    """From now on a task of this loop that raises SystemExit has raised Exited."""
    loop.set_task_factory(lambda loop, work, **named: asyncio.Task(_contained(work), loop=loop, **named))  # type: ignore[arg-type]


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except SystemExit as exit:
        raise Exited(f"SystemExit: {exit}") from exit
