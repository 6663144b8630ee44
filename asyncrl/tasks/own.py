"""A user's own class as a task. What it has decides what it is:

    question(index) -> record          always: "messages" (a chat), and whatever the rest of it needs
    score(text, record) -> float       one answer, scored
    reset(record), step(text)          an environment (asyncrl/envs/env.py); an instance of its own plays each episode
    async run(prompt, generate)        plays episodes itself, all with one instance, and rewards them

and if it likes `roles` (an environment of several: asyncrl/agents/self_play.py), `size` (number of
questions; else there is no end), `inline` (score is quick: no thread), and `correct(reward)` (whether it means a right
answer; else 1 or more does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.imports import load

WAYS = (("score",), ("reset", "step"), ("run",))


class OwnTask:
    """An instance of a user's class, with what that leaves out."""

    def __init__(self, spec: EnvSpec) -> None:
        self._made = spec.checked()
        self.question: Callable[[int], dict[str, Any]] = self._made.question
        self.inline: bool = getattr(self._made, "inline", False)
        self.size: int | None = getattr(self._made, "size", None)
        self.agent = self._made if hasattr(self._made, "run") else None
        """Who plays it, if it does so itself."""
        self.environment = spec if hasattr(self._made, "step") else None
        """What its episodes are played in, if it is an environment."""
        self.roles: Sequence[str] = getattr(self._made, "roles", ())
        """Who acts in that, where there are several."""

    def score(self, answer: str, question: dict[str, Any]) -> float:
        """What the class says."""
        if not hasattr(self._made, "score"):
            raise TypeError(f"{type(self._made).__name__} has no score, and its episode came without a reward")
        return float(self._made.score(answer, question))

    def correct(self, reward: float) -> bool:
        """What the class says, or a reward of 1 or more."""
        return bool(self._made.correct(reward)) if hasattr(self._made, "correct") else reward >= 1.0


def own_task(path: str, params: Mapping[str, Any]) -> OwnTask:
    """The task that a class at an import path makes with its arguments. Raises ConfigError."""
    found = load(path, "task.kind")
    ways = " or ".join(" and ".join(way) for way in WAYS)
    if not isinstance(found, type) or not hasattr(found, "question"):
        raise ConfigError("task.kind", path, f"Must be a class with question(index), and {ways}.")
    if not any(all(hasattr(found, name) for name in way) for way in WAYS):
        raise ConfigError("task.kind", path, f"Beside question(index) it needs {ways}.")
    return OwnTask(EnvSpec(path, params))
