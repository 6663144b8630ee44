"""Pool of environments: created ahead of time, closed in the background, and limited in number.

waits for     the limit (`concurrency`), the breaker (asyncrl/envs/breaker.py), the creation (`reset_timeout`)
unblocked by  every episode that ends
on a fault    EpisodeFailed("environment_..."): the episode is retried (rollout.retries); many failures open the breaker
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl import lookup
from asyncrl.envs.breaker import Breaker
from asyncrl.envs.env import Env, EnvSpec, Question, Step, awaited, checked_messages
from asyncrl.errors import ConfigError, EpisodeFailed, raised_by
from asyncrl.observability.intervals import ENVIRONMENT, QUEUED, spent
from asyncrl.schema import Message, number

OUTSIDE = ("environment_", "tool", "sandbox")
"""Prefixes of the failure reasons that the environment, or what it is played with, is responsible for."""


@dataclass(frozen=True)
class PoolSettings:
    """Limits of the environments of a task; times are in seconds."""

    hosted: bool | None = None  # run environments in processes; None: only those whose steps are not async
    per_process: int = 8
    concurrency: int | None = None
    warm: int = 0
    reset_timeout: float = 120.0
    step_timeout: float = 60.0
    max_failures: int = 20
    patience: float = 600.0


class HostedEnvironment(Env, Protocol):
    """An environment in another process, which limits the time of its own calls."""

    @property
    def alive(self) -> bool:
        """Whether its process is alive."""
        ...


class EnvironmentHosts(Protocol):
    """The processes of a pool that hold environments: what an extension offers as `hosting`."""

    async def make(self, spec: EnvSpec, settings: PoolSettings) -> HostedEnvironment:
        """Create an environment in a process. Raises EpisodeFailed."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


class EnvironmentPool:
    """The environments of one task."""

    def __init__(
        self,
        name: str,
        spec: EnvSpec,
        settings: PoolSettings | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the pool. `name` is the task's, for messages about failures, which are passed to `tell`. Raises
        ConfigError if the environments need processes, and no extension has any."""
        self.name = name
        self._spec = spec
        self._settings = settings or PoolSettings()
        self._tell = tell
        hosted = not spec.waits if self._settings.hosted is None else self._settings.hosted
        self._hosts = _hosts() if hosted else None
        self._room = asyncio.Semaphore(self._settings.concurrency) if self._settings.concurrency else None
        self._breaker = Breaker(f"environment {name}", self._settings.max_failures, self._settings.patience, tell)
        self._ready: deque[Env] = deque()
        self._making = 0
        self._warming, self._ending = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
        self._closed = False

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Env]:
        """Yield an environment for one episode."""
        if self._room:
            with spent(QUEUED, self.name):
                await self._room.acquire()
        try:
            await self._breaker.enter()
            verdict = False
            try:
                with spent(ENVIRONMENT, f"{self.name}.start"):
                    env = await self._next()
                try:
                    yield _Guarded(env, self._settings, self.name, limited=self._hosts is not None)
                finally:
                    self._later(self._end(env), self._ending)
                verdict = True
                self._breaker.succeeded()
            except EpisodeFailed as failed:
                if failed.reason.startswith(OUTSIDE):
                    verdict = True
                    self._breaker.failed(str(failed))
                raise
            finally:
                if not verdict:
                    self._breaker.left()
        finally:
            if self._room:
                self._room.release()

    async def start(self) -> None:
        """Create the environments to be kept warm, in the background."""
        self._warm_up()

    async def close(self) -> None:
        """Close all environments."""
        self._closed = True
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        while self._ready:
            self._later(self._end(self._ready.popleft()), self._ending)
        await asyncio.gather(*self._ending)  # each ends within reset_timeout
        if self._hosts:
            await self._hosts.close()

    # -- one after the other -------------------------------------------------------------------------------

    async def _next(self) -> Env:
        while self._ready:
            env = self._ready.popleft()
            if self._hosts is None or getattr(env, "alive", True):
                self._warm_up()
                return env
        env = await self._make()
        self._warm_up()
        return env

    def _warm_up(self) -> None:
        while len(self._ready) + self._making < self._settings.warm and not self._closed:
            self._making += 1
            self._later(self._make_ready(), self._warming)

    async def _make_ready(self) -> None:
        try:
            self._ready.append(await self._make())
        except EpisodeFailed as failed:
            # the next episode that needs an environment tries again
            self._tell(f"environment {self.name} could not be created ahead of time: {failed}")
        finally:
            self._making -= 1

    async def _make(self) -> Env:
        if self._hosts:
            return await self._hosts.make(self._spec, self._settings)
        with raised_by("environment_error", retry=True):
            env: Env = self._spec.make()
            return env

    async def _end(self, env: Env) -> None:
        """Close an environment while later episodes run. Errors are reported; nobody waits for them."""
        close = getattr(env, "close", None)
        try:
            if close:
                with raised_by("environment_error"):
                    async with asyncio.timeout(self._settings.reset_timeout):
                        await awaited(close())
        except EpisodeFailed as failed:
            self._tell(f"environment {self.name} did not close: {failed}")

    def _later(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _hosts() -> EnvironmentHosts:
    """Return processes of an extension for the environments of a pool. Raises ConfigError."""
    if not (offers := lookup.loaded("hosting")):
        remedy = "No extension that is installed runs environments in processes: make `step` async, or set false."
        raise ConfigError("task.environments.hosted", None, remedy)
    hosts: EnvironmentHosts = offers[0]()
    return hosts


class _Guarded:
    """Wrapper of an environment that turns its faults into typed failures and checks its answers."""

    def __init__(self, env: Env, settings: PoolSettings, name: str, *, limited: bool) -> None:
        """`limited` says that the environment limits the time of its calls itself."""
        self._env, self._settings, self._name = env, settings, name
        self._limited = limited

    async def reset(self, question: Question) -> list[Message]:
        """Call the environment's reset."""
        found = await self._call("reset", self._settings.reset_timeout, "reset_timeout", question)
        with raised_by("environment_error", retry=True):
            return checked_messages(found or (), "reset")

    async def step(self, action: str) -> Step:
        """Call the environment's step."""
        found = await self._call("step", self._settings.step_timeout, "step_timeout", action)
        if not isinstance(found, Step):
            raise EpisodeFailed("environment_error", f"step returned {type(found).__name__} instead of a Step")
        with raised_by("environment_error", retry=True):
            return found.plain()

    async def finish(self) -> float:
        """Call the environment's finish. Returns 0 if it has none."""
        if not hasattr(self._env, "finish"):
            return 0.0
        found = await self._call("finish", self._settings.step_timeout, "step_timeout")
        with raised_by("environment_error", retry=True):
            return number(found, "the reward of finish")

    async def _call(self, method: str, seconds: float, limit: str, *arguments: Any) -> Any:
        try:
            with spent(ENVIRONMENT, f"{self._name}.{method}"):
                async with asyncio.timeout(None if self._limited else seconds):
                    with raised_by("environment_error", retry=True):
                        return await awaited(getattr(self._env, method)(*arguments))
        except TimeoutError:
            detail = f"{method} did not return within {seconds:g} s (task.environments.{limit})"
            raise EpisodeFailed("environment_timeout", detail) from None
