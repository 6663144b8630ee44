"""What an agent is. It reaches the model through `generate` alone: it knows no URL, no engine and no trainer.

a function     async def my_agent(prompt, generate) -> Trajectory | float | None
a class        with such a method, `run`; made once, with the run's agent_params, it plays all episodes, many at once
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.config import Config
from asyncrl.envs.pool import Environments
from asyncrl.errors import ConfigError
from asyncrl.imports import load
from asyncrl.tasks import Task
from asyncrl.types import Generate, Prompt, Trajectory

Played = Trajectory | float | None
"""What an agent makes of an episode: its turns, and the reward if it is not the task's to give; or the reward alone, or
nothing, where everything that it asked for is to be trained."""


class Agent(Protocol):
    """Plays one episode of a prompt. Raises EpisodeFailed when the episode is lost."""

    async def run(self, prompt: Prompt, generate: Generate) -> Played: ...


class Function:
    """An agent that is a function."""

    def __init__(self, function: Callable[..., Awaitable[Played]], params: Mapping[str, Any]) -> None:
        self._function, self._params = function, params

    async def run(self, prompt: Prompt, generate: Generate) -> Played:
        """One call."""
        return await self._function(prompt, generate, **self._params)


def load_agent(path: str, params: Mapping[str, Any], field: str = "agent") -> Agent:
    """The agent at an import path, module:name, with its parameters. Raises ConfigError for that field."""
    found = load(path, field)
    if inspect.iscoroutinefunction(found):
        return Function(found, params)
    if not isinstance(found, type) or not inspect.iscoroutinefunction(getattr(found, "run", None)):
        remedy = "Must be an async function of (prompt, generate), or a class with such a method, run."
        raise ConfigError(field, path, remedy)
    return _made(found, params, field)


def _made(kind: Callable[..., Agent], params: Mapping[str, Any], field: str) -> Agent:
    try:
        inspect.signature(kind).bind(**params)
    except TypeError as error:
        raise ConfigError(
            f"{field}_params", dict(params), f"{kind.__qualname__} does not take them: {error}."
        ) from None
    return kind(**params)


def agents(config: Config, tasks: Mapping[str, Task]) -> dict[str, Agent]:
    """Who plays each task and evaluation set: the one that its section names, or that it brings, or plays in the
    environment that it brings; else the run's."""
    every = load_agent(config.agent, config.agent_params)
    found = {}
    for name, section in (config.mixture | config.eval_sets).items():
        task, field = tasks[name], f"{config.field_of(name)}.agent"
        if section.agent:
            found[name] = load_agent(section.agent, section.agent_params, field)
        elif own := getattr(task, "agent", None):
            found[name] = own
        elif make := getattr(task, "environment", None):
            found[name] = _made(MultiTurn, {"environments": Environments(make), **section.agent_params}, field)
        else:
            found[name] = every
    return found
