"""HTTP server of the rollout service, running beside the rollouts, and containment of SystemExit.

An event loop, and with it the process, ends when one of its tasks raises SystemExit. Tasks of this process also run
user code: an agent, a reward, an environment, and tasks that these start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import uvicorn

from asyncrl.rollout.service import Service
from asyncrl.tls import Signed


async def serve(service: Service, address: str, rolling_out: Coroutine[Any, Any, None], signed: Signed | None) -> None:
    """Serve until the launcher sends SIGTERM. Raises the first error of the service or of the rollouts."""
    url = httpx.URL(address)
    server = uvicorn.Server(
        uvicorn.Config(
            service.app(),
            host=url.host,
            port=url.port or 0,
            log_level="warning",
            access_log=False,
            ssl_certfile=signed.server if signed else None,
        )
    )
    async with asyncio.TaskGroup() as group:
        rolling = group.create_task(rolling_out)
        failing = group.create_task(service.fail())
        await group.create_task(server.serve())  # SIGTERM ends it: uvicorn handles the signal
        rolling.cancel()
        failing.cancel()


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
