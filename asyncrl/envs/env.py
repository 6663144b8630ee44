"""What an environment is: it is told what the model wrote, and tells what happened."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.imports import load, made
from asyncrl.schema import Message, number

Question = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What an action led to."""

    messages: Sequence[Message] | str = ()
    """What the model reads next; a text is one message of the user's."""
    reward: float = 0.0
    """Of the turn."""
    done: bool = False
    """The episode is over."""
    score: bool = False
    """If the episode ends here, the task's own reward function is asked about this text; what the environment gave turn
    by turn is added to that."""
    state: str = ""
    """Names the state that was reached, if the same one may be reached again: for step-level groups (gigpo)."""
    role: str = ""
    """In an episode of several (asyncrl/agents/self_play.py): who reads the messages, and acts next. Who begins, and
    reads the question and what the reset tells, is the question's "role"."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """In such an episode, in the place of `reward`: by role, of its last turn. Who has not acted cannot be rewarded."""
    info: dict[str, Any] = field(default_factory=dict)
    """For logs; nothing reads it."""

    def plain(self) -> Step:
        """With rewards that are Python's own numbers. Raises ValueError for what is not finite, or no number."""
        rewards = {str(role): number(reward, f"the reward of {role}") for role, reward in self.rewards.items()}
        return replace(self, reward=number(self.reward, "the reward of a step"), rewards=rewards)


class Env(Protocol):
    """One episode: reset, steps until one is done, and `close`, if it has one. Where the episode ends before that, at
    the limit of turns or of tokens, `finish`, if it has one, tells the reward that is still due. Each method is plain
    or async. Whatever they raise costs the episode its group, never a reward: EpisodeFailed tells the reason."""

    def reset(self, question: Question) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin the episode of this question. What it returns follows the question's own messages; most often, nothing
        does."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """What the model's text does."""
        ...


@dataclass(frozen=True)
class EnvSpec:
    """An environment's class, and the arguments that an instance is made with: enough to make it in another process."""

    path: str
    """module:name"""
    params: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """A new one (an Env, and whatever else it may be). Raises ConfigError when there is no such class, or it does
        not take the arguments."""
        kind = load(self.path, "task.kind")
        try:
            inspect.signature(kind).bind(**self.params)
        except TypeError as error:
            raise ConfigError("task.params", dict(self.params), f"{self.path} does not take them: {error}.") from None
        return kind(**self.params)

    def checked(self) -> Any:
        """One for a look at it, before a run: also raises ConfigError when it raises something else than ours."""
        return made(self.make, {}, "task.kind", self.path)

    @property
    def waits(self) -> bool:
        """Whether its steps are async, and so may share an event loop: plain ones would stop it."""
        return inspect.iscoroutinefunction(load(self.path, "task.kind").step)
