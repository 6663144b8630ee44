"""What an environment is: it is told what the model wrote, and tells what happened."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.types import Message

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
    state: str = ""
    """Names the state that was reached, if the same one may be reached again: for step-level groups (gigpo)."""
    info: dict[str, Any] = field(default_factory=dict)
    """For logs; nothing reads it."""


class Env(Protocol):
    """One episode at a time: reset, then steps until one is done. Each method may be plain or async; a plain one must
    not block. Whatever they raise costs the episode its group, never a reward: EpisodeFailed tells the reason."""

    def reset(self, question: Question) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin an episode of this question. What it returns follows the question's own messages; most often, nothing
        does."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """What the model's text does."""
        ...
