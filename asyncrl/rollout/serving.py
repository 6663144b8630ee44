"""How a process of the rollout side runs its HTTP server, and keeps user code from ending or holding it.

The event loop, and with it the process, ends when one of its tasks raises SystemExit or KeyboardInterrupt. Tasks of
this process also run user code (an agent, a reward, an environment, and tasks that these start), for which `contain`
turns them into another exception. User code also shares the threads of asyncio.to_thread with what this process writes
to disk, and may fill any number of them with calls that wait for the model.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import httpx
import uvicorn

from asyncrl.errors import described
from asyncrl.network.serving import SignalFreeServer
from asyncrl.network.tls import Signed
from asyncrl.rollout.server import RolloutServer
from asyncrl.threads import ThreadPerCall

CLOSE_SECONDS = 3
"""Seconds that open requests get at the end, after which they are cancelled: more than POLL_SECONDS (server.py)."""


async def serve(
    server: RolloutServer, address: str, rolling_out: Coroutine[Any, Any, None], signed: Signed | None
) -> None:
    """Serve until the launcher sends SIGTERM. Raises the first error of the server or of the rollouts."""
    url = httpx.URL(address)
    listening = SignalFreeServer(
        uvicorn.Config(
            server.app(),
            host=url.host,
            port=url.port or 0,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_certfile=signed.server if signed else None,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, listening.end)
    try:
        async with asyncio.TaskGroup() as group:
            rolling = group.create_task(rolling_out)
            failing = group.create_task(server.fail())
            await group.create_task(listening.serve())  # until SIGTERM
            rolling.cancel()
            failing.cancel()
    finally:  # after an error, connections would report that the loop is closed, below the error
        for listener in listening.servers if listening.started else ():
            listener.close()
        for connection in list(listening.server_state.connections):
            connection.transport.abort()


class Exited(Exception):
    """User code called sys.exit, or raised KeyboardInterrupt."""


def contain(loop: asyncio.AbstractEventLoop) -> None:
    """Make tasks of this loop raise Exited where their code raises SystemExit or KeyboardInterrupt, and give every call
    of asyncio.to_thread a thread of its own."""
    loop.set_default_executor(ThreadPerCall())
    loop.set_task_factory(lambda loop, work, **named: asyncio.Task(_contained(work), loop=loop, **named))  # type: ignore[arg-type]


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as exit:
        raise Exited(described(exit)) from exit
