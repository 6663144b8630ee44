"""The worker process as asyncrl sees it: asked once for its tasks, or kept to play episodes.

waits for     the worker's first line (start_timeout), then its episodes, which the core's timeouts end
on a hang     an episode that is given up is cancelled in the worker; the process is killed at the end of the run
on death      EpisodeFailed("environment_died") for all of its episodes; the next one starts a new process
leaves        nothing: the process ends when its stdin does, and it has a process group of its own, which is killed
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.children.processes import ChildProcess, OutputTail
from asyncrl.extensions.hosting.hosted import AnsweringProcess
from asyncrl.extensions.proxy.programs import LAST_CHARACTERS, LAST_LINES, reaching
from asyncrl.extensions.verifiers import envs

HERE = Path(__file__).parent
MOST_BYTES = 64 << 20
"""Most bytes of a line."""
END_SECONDS = 5.0
"""Time that the worker has to end its tools and sandboxes."""


@dataclass(frozen=True)
class Launch:
    """How a worker is started: task.name, and task.params."""

    env: str
    args: Mapping[str, Any] | None = None
    """verifiers' own configuration of the environment: taskset, agents by name, timeout, ..."""
    venv: str | None = None
    """Virtual environment (asyncrl-envs), by default that of the environment's name."""
    select: Mapping[str, Any] | None = None
    """verifiers' choice of tasks: include, exclude, shuffle, seed, skip, limit."""
    most: int = 1000
    """Number of tasks of an endless environment."""
    start_timeout: float = 300.0
    """Seconds until the worker must be ready."""
    tool_format: str = "hermes"
    """How the model writes tool calls (extensions/proxy/parsing.py)."""
    environment: Sequence[str] = ()
    """Environment variables that the worker has beside harmless ones (envs.py), such as keys of judges."""

    def argv(self) -> list[str]:
        """Return the command. Raises ConfigError if the virtual environment is not there."""
        return [str(envs.python(self.venv or self.env)), str(HERE / "worker.py")]

    def first_line(self, url: str | None) -> bytes:
        """Return what the worker reads first. It may hold keys, so it is no argument."""
        args = dict(self.args or {})
        env = {**args, "taskset": {"id": self.env, **args.get("taskset", {})}}
        told = {"env": env, "select": dict(self.select or {}), "most": self.most, "url": url}
        return json.dumps(told).encode() + b"\n"

    def variables(self, secret: str = "") -> dict[str, str]:
        """Return the worker's environment, with the proxy's secret. Raises ConfigError for a name that is not set, or
        that only `args` have."""
        found = envs.public(os.environ, self.environment)
        texts = set(re.findall(r'"(\w+)"(?!:)', json.dumps(self.args)))
        if absent := sorted({*self.environment, *(texts & os.environ.keys())} - found.keys()):
            remedy = f"To reach the worker, the variable {absent[0]} must be set, and listed here."
            raise ConfigError("task.params.environment", self.environment, remedy)
        found |= reaching("127.0.0.1", Path(self.argv()[0])) | {"CUDA_VISIBLE_DEVICES": ""}
        return found | {"PYTHONPATH": str(HERE / "harness"), "ASYNCRL_PROXY_API_KEY": secret}

    def ready(self, line: bytes, said: str) -> dict[str, Any]:
        """Return what the worker's first line tells. Raises ConfigError."""
        try:
            told = json.loads(line)
        except ValueError:
            remedy = f"Its worker ended before it was ready. The last lines that it wrote:\n{said or '(none)'}"
            raise ConfigError("task.name", self.env, remedy) from None
        if refused := told.get("refused"):
            raise ConfigError(f"task.params.{refused['field']}", refused["value"], refused["remedy"])
        found: dict[str, Any] = told["ready"]
        if not found["tasks"]:
            raise ConfigError("task.params.select", self.select, f"It leaves no task of {self.env}.")
        return found

    def tasks(self) -> dict[str, Any]:
        """Ask a worker of its own for the agents and tasks of the environment. Raises ConfigError."""

        async def told() -> dict[str, Any]:
            worker, found = await HubWorker.start(self, None, "")
            await worker.close()
            return found

        with ThreadPoolExecutor(1) as beside:  # this thread may have an event loop, which waits for the answer
            return beside.submit(asyncio.run, told()).result()


class HubWorker(AnsweringProcess):
    """A worker that plays."""

    def __init__(
        self, child: ChildProcess, printed: OutputTail, stdin: asyncio.StreamWriter, lines: asyncio.StreamReader
    ) -> None:
        super().__init__(child, printed)
        self._stdin, self._lines = stdin, lines

    @classmethod
    async def start(cls, launch: Launch, url: str | None, secret: str) -> tuple[HubWorker, dict[str, Any]]:
        """Start a worker, and wait until it is ready. Returns also what it tells of the environment. Without a url it
        ends then. Raises ConfigError."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = ChildProcess(launch.argv(), env=launch.variables(secret), **pipes)
        async with child.ended_on_error():
            printed, stdin = await child.tail("stderr"), await child.writer()
            stdin.write(launch.first_line(url))
            lines = await child.reader(line=MOST_BYTES)
            try:
                async with asyncio.timeout(launch.start_timeout):
                    if not (first := await lines.readline()):
                        await printed.ended
            except TimeoutError:
                remedy = "Its worker was not ready by then."
                raise ConfigError("task.params.start_timeout", launch.start_timeout, remedy) from None
            told = launch.ready(first, printed.last_lines(LAST_LINES, LAST_CHARACTERS))
            return cls(child, printed, stdin, lines), told

    async def play(self, task: int, session: str) -> dict[str, Any]:
        """Return what the worker tells of an episode. Raises EpisodeFailed when it dies."""
        with self._asking() as (number, answer):
            self._send({"play": number, "task": task, "session": session})
            try:
                told: dict[str, Any] = await answer
                return told
            except asyncio.CancelledError:
                if self.alive:
                    self._send({"cancel": number})
                raise

    async def close(self) -> None:
        """Let the worker end what it started, then kill it."""
        self._retire(EpisodeFailed("environment_died", "its worker was ended"))
        with suppress(ConnectionError):
            self._stdin.close()
        await self._child.wait(END_SECONDS)
        self._child.kill()
        await asyncio.wait({self._listening}, timeout=2 * END_SECONDS)  # what left its group may hold its pipe

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # the listener tells of its death
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def _answers(self) -> EpisodeFailed | None:
        try:
            while (line := await self._lines.readline()).endswith(b"\n"):  # a worker that dies may leave half a line
                told = json.loads(line)
                self._settle(told["played"], told)
        except (ValueError, KeyError, TypeError) as error:
            return EpisodeFailed("environment_garbage", f"its worker wrote an invalid line: {error!r}")
        return None
