"""Containment of SystemExit: raised in a task, it is an error of that task alone.

An event loop, and with it the process, ends when one of its tasks raises SystemExit. Tasks of this process also run
user code: an agent, a reward, an environment, and tasks that these start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Exited(Exception):
    """User code called sys.exit."""


def contain(loop: asyncio.AbstractEventLoop) -> None:
    """Make tasks of this loop raise Exited where their code raises SystemExit."""
    loop.set_task_factory(lambda loop, work, **named: asyncio.Task(_contained(work), loop=loop, **named))  # type: ignore[arg-type]


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except SystemExit as exit:
        raise Exited(f"SystemExit: {exit}") from exit
