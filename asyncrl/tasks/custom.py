"""A user's own class as a task. The methods that it defines decide what it is:

    question(index) -> record          always: "messages" (a chat), and whatever the other methods need
    score(text, record) -> float       scores one answer
    reset(record), step(text)          an environment (asyncrl/envs/env.py); each episode gets an instance of its own
    async run(prompt, generate)        plays episodes itself, all with one instance, and rewards them

Optional attributes are `roles` (for an environment with several: docs/agents.md), `size` (number of questions; endless
without it), `inline` (score is quick: no thread), and `correct(reward)` (whether it means a correct answer; by default
a reward of 1 or more does).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.user_code import load

WAYS = (("score",), ("reset", "step"), ("run",))


class CustomTask:
    """Instance of a user's class, with defaults for what the class omits."""

    def __init__(self, spec: EnvSpec) -> None:
        self._made = spec.checked()
        self.question: Callable[[int], dict[str, Any]] = self._made.question
        self.inline: bool = getattr(self._made, "inline", False)
        self.size: int | None = getattr(self._made, "size", None)
        if self.size is not None and not (hasattr(self.size, "__index__") and self.size > 0):
            raise ConfigError(
                "task.kind", spec.path, f"Its size, {self.size!r}, must be the number of questions, or None."
            )
        self.agent = self._made if hasattr(self._made, "run") else None
        """The agent, if the class plays its episodes itself."""
        self.environment = spec if hasattr(self._made, "step") else None
        """The environment of its episodes, if the class is one."""
        self.roles: Sequence[str] = getattr(self._made, "roles", ())
        """Roles in the environment, if there are several."""

    def score(self, answer: str, question: dict[str, Any]) -> Any:
        """Return what the class returns as score. Raises TypeError if it has none."""
        if not hasattr(self._made, "score"):
            raise TypeError(f"{type(self._made).__name__} has no method score, and the episode returned no reward")
        return self._made.score(answer, question)

    def correct(self, reward: float) -> bool:
        """Return what the class says, or by default whether the reward is 1 or more."""
        return bool(self._made.correct(reward)) if hasattr(self._made, "correct") else reward >= 1.0


def custom_task(path: str, params: Mapping[str, Any]) -> CustomTask:
    """Build the task from the class at an import path and its params. Raises ConfigError."""
    found = load(path, "task.kind")
    ways = " or ".join(" and ".join(way) for way in WAYS)
    if not isinstance(found, type) or not hasattr(found, "question"):
        raise ConfigError("task.kind", path, f"Must be a class with question(index), and {ways}.")
    if not any(all(hasattr(found, name) for name in way) for way in WAYS):
        raise ConfigError("task.kind", path, f"Besides question(index) it needs {ways}.")
    if hasattr(found, "run") and not inspect.iscoroutinefunction(found.run):
        raise ConfigError("task.kind", path, "Its method run must be async: async def run(self, prompt, generate).")
    return CustomTask(EnvSpec(path, params))
