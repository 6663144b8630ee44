"""The rollout process's end of its spawner.

waits for     its first word (START_SECONDS), the end of a sandbox (CLOSE_SECONDS), its own end (CLOSE_SECONDS)
unblocked by  the spawner, or its death
on a hang     EpisodeFailed("sandbox"); a spawner that does not end is killed
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.envs.sandbox.spawner import MESSAGE
from asyncrl.envs.sandbox.starts import Order
from asyncrl.errors import EpisodeFailed

START_SECONDS = 30.0
CLOSE_SECONDS = 10.0
_ROOT = Path(__file__).resolve().parents[3]
_CODE = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from asyncrl.envs.sandbox.spawner import main; main()"


class Spawning:
    """A spawner that runs."""

    def __init__(self, order: Order) -> None:
        """Starts it, which holds the event loop for a millisecond or two."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", _CODE]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(asdict(order))],
                env={},  # nothing of ours can be found in what it makes
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what is sent to our process group is not for it: it cleans up after us
            )
        loop = asyncio.get_running_loop()
        self._facts: asyncio.Future[Mapping[str, Any]] = loop.create_future()
        self._gone: dict[int, asyncio.Future[str]] = {}  # by sandbox: what was said of its end
        self._listening = asyncio.ensure_future(self._listen())
        self.alive = True

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def facts(self) -> Mapping[str, Any]:
        """What it found on this machine: the arguments of protections.in_force. Raises EpisodeFailed."""
        async with within(START_SECONDS, "the spawner has not come up"):
            facts = await asyncio.shield(self._facts)
        if not facts:
            raise EpisodeFailed("sandbox", "the spawner died while it came up")
        return facts

    def open(self, number: int, theirs: socket.socket) -> None:
        """Have a sandbox made that serves the other end of this socket. Raises EpisodeFailed."""
        if not self.alive:
            raise EpisodeFailed("sandbox", "the spawner has died")
        self._gone[number] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._connection, [json.dumps({"open": number}).encode()], [theirs.fileno()])
        except OSError as error:  # full, or dead
            del self._gone[number]
            raise EpisodeFailed("sandbox", f"the spawner takes no requests: {error}") from None

    def kill(self, number: int) -> None:
        """End a sandbox; `gone` tells when it has."""
        if self.alive and number in self._gone and not self._gone[number].done():
            try:
                self._connection.send(json.dumps({"close": number}).encode())
            except BlockingIOError:
                asyncio.get_running_loop().call_later(0.01, self.kill, number)
            except OSError:  # it has died, and takes its sandboxes along
                return

    async def gone(self, number: int) -> str:
        """When nothing is left of a sandbox: what it had to say, for people. Raises EpisodeFailed."""
        if number not in self._gone:
            return ""
        async with within(CLOSE_SECONDS, "the sandbox does not end"):
            text = await asyncio.shield(self._gone[number])
        self._gone.pop(number, None)
        return text

    async def end(self) -> None:
        """It ends what it has made, and itself."""
        self._connection.close()
        self._listening.cancel()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._connection, MESSAGE):
                notice = json.loads(data)
                if "facts" in notice:
                    self._facts.set_result(notice["facts"])
                elif (gone := self._gone.get(notice["gone"])) and not gone.done():
                    gone.set_result(notice["text"])
        except OSError:  # it was killed
            pass
        finally:
            self.alive = False
            if not self._facts.done():
                self._facts.set_result({})
            for gone in self._gone.values():
                if not gone.done():
                    gone.set_result("the spawner has died")


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """asyncio.timeout whose end is a fault of the sandbox."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise EpisodeFailed("sandbox", f"{what} for {seconds:.0f} s") from None
