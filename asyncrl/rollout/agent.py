"""The agent interface. An agent reaches the model through `generate` alone: it knows no URL, no engine and no trainer.

a function     async def my_agent(prompt, generate) -> Trajectory | float | None
a class        with such a method, `run`. It is built once, with agent_params, and plays all episodes, many of them
               concurrently. It may define `async start()` and `async close()`, called before the first episode and
               after the last, and `figures()`, which returns counts by their names in metrics.jsonl.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from traceback import format_exception
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.config import Config
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import AsyncRLError, ConfigError, raised_by
from asyncrl.schema import Generate, Prompt, Trajectory
from asyncrl.tasks import Task
from asyncrl.user_code import check_arguments, load, made

T = TypeVar("T")
Played = Trajectory | float | None
"""Result of an agent's episode: a Trajectory (its reward is None if the task gives it); or the reward alone, or None,
when every request that the agent made is to be trained.
"""


class AgentRequest(msgspec.Struct):
    """What an agent passes to `generate`, beside images."""

    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    max_new_tokens: int | None
    role: str
    stop: list[str]


class Agent(Protocol):
    """Plays one episode of a prompt. Raises EpisodeFailed when the episode is lost."""

    async def run(self, prompt: Prompt, generate: Generate) -> Played: ...


class FunctionAgent:
    """Agent that calls a function."""

    def __init__(self, function: Callable[..., Awaitable[Played]], params: Mapping[str, Any]) -> None:
        self._function, self._params = function, params

    async def run(self, prompt: Prompt, generate: Generate) -> Played:
        """Call the function with the agent's parameters."""
        return await self._function(prompt, generate, **self._params)


def load_agent(path: str, params: Mapping[str, Any], field: str = "agent") -> Agent:
    """Load the agent at an import path, module:name, with its parameters. Raises ConfigError for that field."""
    kind = load(path, field)
    if inspect.iscoroutinefunction(kind):
        _check_takes_prompt(kind, path, field)
        check_arguments(kind, params, f"{field}_params", path, None, None)
        return FunctionAgent(kind, params)
    if not isinstance(kind, type) or not inspect.iscoroutinefunction(getattr(kind, "run", None)):
        raise ConfigError(field, path, FORMS)
    agent = _made(kind, params, field)
    _check_takes_prompt(agent.run, path, field)
    return agent


FORMS = "Must be an async function of (prompt, generate), or a class with such a method, run."


def _check_takes_prompt(function: Callable[..., Any], path: str, field: str) -> None:
    """Raise ConfigError if the function cannot be called with a prompt and `generate`, whatever its other arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind_partial(None, None)
    except TypeError:
        raise ConfigError(field, path, f"{FORMS} This one takes {signature}.") from None


def _made(kind: Callable[..., Agent], params: Mapping[str, Any], field: str) -> Agent:
    check_arguments(kind, params, f"{field}_params", kind.__qualname__)
    agent: Agent = made(kind, params, field, kind.__qualname__)
    return agent


def agents(config: Config, tasks: Mapping[str, Task], tell: Callable[[str], None]) -> dict[str, Agent]:
    """Return the agent of each task and evaluation set.

    In order of precedence: the agent that the set's config section names; the one that the task brings; for a task with
    an environment, MultiTurn; the run's agent. An agent of a task with an environment gets its pool as `environments`,
    and, if the environment has several roles, these as `roles`. `tell` receives messages about environments that fail.
    """
    every = load_agent(config.agent, config.agent_params)
    playing = {}
    for name, section in (config.mixture | config.eval_sets).items():
        task = tasks[name]
        field = f"{config.field_of(name)}.agent"
        params = dict(section.agent_params)
        roles = getattr(task, "roles", ())
        if spec := getattr(task, "environment", None):
            settings = PoolSettings(**section.environments.model_dump())
            params["environments"] = EnvironmentPool(name, spec, settings, tell)
            if roles:
                params["roles"] = roles
        if section.agent:
            playing[name] = load_agent(section.agent, params, field)
        elif own := getattr(task, "agent", None):
            playing[name] = own
        elif spec and roles:
            remedy = f"Name an agent that plays the roles {list(roles)}: asyncrl_recipes.self_play.agent:SelfPlay does."
            raise ConfigError(field, None, remedy)
        else:
            playing[name] = _made(MultiTurn, params, field) if spec else every
    return playing


def figures(agents: Iterable[Agent]) -> dict[str, float]:
    """Return the sums of what agents count since the start of the run, under their names in metrics.jsonl."""
    counted = Counter[str]()
    for agent in distinct(agents):
        if count := getattr(agent, "figures", None):
            counted.update(count())
    return {name: float(count) for name, count in counted.items()}


def distinct(parts: Iterable[T]) -> list[T]:
    """Return every object once. Objects of users need not be hashable: those of a dataclass are not."""
    return list({id(part): part for part in parts}.values())


async def start_all(parts: Iterable[object]) -> None:
    """Call `start` once on every distinct part that has it."""
    for part in distinct(parts):
        if start := getattr(part, "start", None):
            await start()


async def close_all(parts: Iterable[object], warn: Callable[[str, str | None], None]) -> None:
    """Call `close` once on every distinct part that has it. Its error becomes a warning, which neither keeps the rest
    from being closed nor hides the error that ended the process."""
    for part in distinct(parts):
        if close := getattr(part, "close", None):
            try:
                with raised_by("close"):
                    await close()
            except AsyncRLError as error:
                text = f"{type(part).__qualname__} could not be closed: {error}"
                warn(text, "".join(format_exception(error)))
