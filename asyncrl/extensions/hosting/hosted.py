"""Environments in separate processes: one that hangs, crashes or floods costs its own episodes, not the run.

waits for     an answer, as long as the caller says
on a hang     EpisodeFailed("environment_timeout") for the one that hung; its process is killed, with all in it
on death      EpisodeFailed("environment_died") for all of them, with the signal or exit code and the last lines
on nonsense   frames that are no frames, or longer than OVERSIZED: killed; environment_garbage, environment_oversized
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from asyncrl.envs.env import EnvSpec, Question, Step
from asyncrl.envs.pool import PoolSettings
from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.children.processes import ChildProcess, OutputTail, OversizedMessage, describe, framed, received
from asyncrl.extensions.hosting.host import VALUE
from asyncrl.schema import Message

OVERSIZED = 16 << 20
"""Maximum size of an answer in bytes."""
LAST_LINES, LAST_CHARACTERS = 8, 4000
"""What is shown of a process's output for diagnosis."""
END_SECONDS = 2.0


class AnsweringProcess:
    """A process that answers numbered requests, several at a time. Those that are open when it ends fail."""

    def __init__(self, child: ChildProcess, printed: OutputTail) -> None:
        self._child, self._printed = child, printed
        self._serial = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._end: EpisodeFailed | None = None
        self.alive = True
        """Whether it takes requests."""
        self._listening = asyncio.create_task(self._listen())

    @contextmanager
    def _asking(self) -> Iterator[tuple[int, asyncio.Future[Any]]]:
        """Give a request its number, and the answer to wait for. Raises EpisodeFailed if the process has ended."""
        if not self.alive:
            raise self._end or EpisodeFailed("environment_died", "its process has ended")
        answer = self._asked[number := next(self._serial)] = asyncio.get_running_loop().create_future()
        try:
            yield number, answer
        finally:
            self._asked.pop(number, None)
            answer.cancel()

    def _settle(self, number: int, value: Any) -> None:
        """Pass an answer, or why there is none, to its caller, if it still waits."""
        answer = self._asked.get(number)
        if answer is None or answer.done():
            return
        answer.set_exception(value) if isinstance(value, EpisodeFailed) else answer.set_result(value)

    def _retire(self, why: EpisodeFailed | None) -> None:
        """Take no further requests. Without a reason, how the process ends is the reason."""
        if self.alive:
            self.alive, self._end = False, why

    async def _answers(self) -> EpisodeFailed | None:
        """Settle requests until the stream ends. Returns what is wrong with an answer that cannot be read."""
        raise NotImplementedError

    async def _listen(self) -> None:
        """Take answers until the process ends, and tell those who still wait why."""
        self._retire(await self._answers())
        status = await self._child.end()
        if self._end is None:
            await asyncio.wait({self._printed.ended}, timeout=END_SECONDS)  # another process may hold the pipe
            printed = self._printed.last_lines(LAST_LINES, LAST_CHARACTERS)
            said = f"; its last output:\n{printed}" if printed else ""
            self._end = EpisodeFailed("environment_died", f"its process {describe(status)}{said}")
        self._child.close()
        for number in list(self._asked):
            self._settle(number, self._end)


class Host(AnsweringProcess):
    """One host process."""

    def __init__(
        self, child: ChildProcess, printed: OutputTail, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(child, printed)
        self._reader, self._writer = reader, writer
        self._writing = asyncio.Lock()
        self.living = 0
        """Environments in this process."""

    @classmethod
    async def start(cls) -> Host:
        """Start a process without environments."""
        ours, theirs = socket.socketpair()
        try:
            child = ChildProcess(
                (sys.executable, "-m", "asyncrl.extensions.hosting.host", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        except OSError as error:
            ours.close()
            raise EpisodeFailed("environment_died", f"its process could not be started: {error}") from None
        finally:
            theirs.close()
        async with child.ended_on_error():
            return cls(child, await child.tail(), *await asyncio.open_connection(sock=ours))

    @property
    def gone(self) -> bool:
        """Return whether its process has ended and nothing needs to wait for it."""
        return self._listening.done()

    async def call(self, env: int, method: str, *arguments: Any, seconds: float, limit: str) -> Any:
        """Call a method of an environment and return its result. Raises EpisodeFailed. `limit` names the setting that
        bounds the seconds."""
        with self._asking() as (number, answer):
            try:
                data = framed([number, env, method, list(arguments)])
            except (TypeError, OverflowError) as error:
                problem = f"its arguments cannot be sent to its process: {error}"
                raise EpisodeFailed("environment_error", problem) from None
            try:
                async with asyncio.timeout(seconds):
                    async with self._writing:
                        self._writer.write(data)
                        await self._writer.drain()
                    return await answer
            except TimeoutError:
                failed = EpisodeFailed("environment_timeout", f"{method} did not return within {seconds:g} s ({limit})")
                self._kill(EpisodeFailed("environment_died", "another environment in its process hung"))
                raise failed from None
            except ConnectionError:
                return await answer  # it fails when the listener knows how the process has ended

    async def close(self) -> None:
        """Stop the process, and wait until it has ended."""
        self._kill(EpisodeFailed("environment_died", "its process was ended"))
        await asyncio.wait({self._listening}, timeout=END_SECONDS)

    async def _answers(self) -> EpisodeFailed | None:
        try:
            while True:
                answer = await received(self._reader, OVERSIZED)
                number, outcome, value = msgspec.convert(answer, tuple[int, str, Any])
                if outcome != VALUE:
                    reason, detail, retry = value
                    value = EpisodeFailed(reason, detail, retry=retry)
                self._settle(number, value)
        except OversizedMessage as error:
            return EpisodeFailed("environment_oversized", str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return EpisodeFailed("environment_garbage", f"its process sent an invalid answer: {error}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None  # the process has ended, or is about to
        finally:
            self._writer.close()

    def _kill(self, why: EpisodeFailed) -> None:
        """Kill the process and everything that it started."""
        self._retire(why)
        self._child.kill()


class HostedEnv:
    """Environment in a host process; an Env with time limits."""

    _serial = itertools.count()

    def __init__(self, host: Host, *, reset_timeout: float, step_timeout: float) -> None:
        self._host, self._name = host, next(self._serial)
        self._reset_timeout, self._step_timeout = reset_timeout, step_timeout
        host.living += 1

    @property
    def alive(self) -> bool:
        """Return whether its process is alive."""
        return self._host.alive

    async def make(self, spec: EnvSpec) -> None:
        """Create the environment in its process."""
        await self._within_reset("make", spec.path, dict(spec.params))

    async def reset(self, question: Question) -> list[Message] | None:
        """Call the environment's reset."""
        found = await self._within_reset("reset", question)
        return _checked(found, list[dict[str, Any]] | None)

    async def step(self, action: str) -> Step:
        """Call the environment's step."""
        limit = "task.environments.step_timeout"
        return _checked(
            await self._host.call(self._name, "step", action, seconds=self._step_timeout, limit=limit), Step
        )

    async def finish(self) -> float:
        """Call the environment's finish. Returns 0 if it has none."""
        limit = "task.environments.step_timeout"
        found = await self._host.call(self._name, "finish", seconds=self._step_timeout, limit=limit)
        return _checked(found or 0.0, float)

    async def close(self) -> None:
        """Call the environment's close, if its process is alive."""
        self._host.living -= 1
        if self._host.alive:
            await self._within_reset("close")

    async def _within_reset(self, method: str, *arguments: Any) -> Any:
        limit = "task.environments.reset_timeout"
        return await self._host.call(self._name, method, *arguments, seconds=self._reset_timeout, limit=limit)


class HostProcesses:
    """The host processes of one pool."""

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._starting = asyncio.Lock()

    async def make(self, spec: EnvSpec, settings: PoolSettings) -> HostedEnv:
        """Create an environment in a process that has room for it."""
        host = await self._host(settings.per_process)
        env = HostedEnv(host, reset_timeout=settings.reset_timeout, step_timeout=settings.step_timeout)
        await env.make(spec)
        return env

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _host(self, most: int) -> Host:
        """Return a host with fewer environments than these."""
        async with self._starting:
            self._hosts = [host for host in self._hosts if not host.gone]
            for host in self._hosts:
                if host.alive and host.living < most:
                    return host
            self._hosts.append(await Host.start())
            return self._hosts[-1]


def _checked(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise EpisodeFailed("environment_garbage", str(error)) from None
