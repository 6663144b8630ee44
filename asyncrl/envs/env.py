"""The environment interface: an environment receives what the model wrote and returns what happened."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.images import are_messages
from asyncrl.schema import Message, number
from asyncrl.user_code import check_arguments, load, made

Question = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """Result of an action."""

    messages: Sequence[Message] | str = ()
    """Messages that the model reads next; a string becomes one user message."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the episode is over."""
    score: bool = False
    """If the episode ends here, the task's own reward function scores this text; the environment's rewards of the turns
    are added to that score."""
    state: str = ""
    """Name of the state that was reached, if the same state may be reached again; used for step-level groups
    (recipes/gigpo)."""
    role: str = ""
    """In an episode with several roles (docs/agents.md): the role that reads the messages and acts next.
    The question's "role" begins, and reads the question and the messages of the reset."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """In such an episode, instead of `reward`: the rewards by role, each for the role's last turn. A role that has not
    acted cannot be rewarded."""
    info: dict[str, Any] = field(default_factory=dict)
    """Values for logs; nothing reads them."""

    def plain(self) -> Step:
        """Return the step with rewards as Python floats. Raises ValueError for other rewards, and other messages."""
        checked_messages(() if isinstance(self.messages, str) else self.messages, "step")
        rewards = {str(role): number(reward, f"the reward of {role}") for role, reward in self.rewards.items()}
        return replace(self, reward=number(self.reward, "the reward of a step"), rewards=rewards)


def checked_messages(messages: Any, method: str) -> list[Message]:
    """Return messages that a method of an environment gave, as a list. Raises ValueError for anything else."""
    if not are_messages(messages):
        raise ValueError(f"the messages of {method} are {messages!r:.80}: each must have role and content")
    return list(messages)


class Env(Protocol):
    """One episode: reset, steps until one is done, and `close`, if it exists. If the episode ends before that, at the
    limit of turns or tokens, `finish`, if it exists, returns the reward that is still due. Each method is sync or
    async. An exception costs the episode its group, and never becomes a reward; EpisodeFailed states the reason."""

    def reset(self, question: Question) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin the episode of this question. The returned messages follow the question's own; most environments return
        none."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply the model's text."""
        ...


@dataclass(frozen=True)
class EnvSpec:
    """Class of an environment and the arguments of its instances, which is enough to create one in another process."""

    path: str
    """module:name"""
    params: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Create an instance (an Env, and whatever else it may be). Raises ConfigError if there is no such class or it
        rejects the arguments."""
        kind = load(self.path, "task.kind")
        check_arguments(kind, self.params, "task.params", self.path)
        return kind(**self.params)

    def checked(self) -> Any:
        """Create an instance to inspect it before a run. Also raises ConfigError for exceptions that are not asyncrl's
        own."""
        return made(self.make, {}, "task.kind", self.path)

    @property
    def waits(self) -> bool:
        """Return whether its steps are async and may therefore share an event loop, which sync steps would block."""
        return inspect.iscoroutinefunction(load(self.path, "task.kind").step)


async def awaited(result: Any) -> Any:
    """Return the result of a plain or an async call."""
    return await result if inspect.isawaitable(result) else result
