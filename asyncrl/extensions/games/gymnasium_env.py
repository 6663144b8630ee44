"""Gymnasium environments as text: observations are described, and actions have names.

Environments of its toy text (toy_text.py) come with a description; others are described by a user's
function, or by Python's text of the observation. The reset takes its seed from the question, and the generators
belong to each environment: an episode is a function of its question and its actions. Rewards are the environment's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.envs.env import Question, Step
from asyncrl.errors import ConfigError
from asyncrl.extensions.games.toy_text import NONE, TOYS
from asyncrl.user_code import load

Describe = Callable[[Any, Any], str]
"""Function (unwrapped environment, observation) -> text."""


class GymnasiumText:
    """Gymnasium environment, named by its id, as an Env.

    make      arguments of gymnasium.make
    actions   a word for each number of a Discrete action space; the last such word of an answer counts
    describe  import path of a function (environment, observation) -> text
    rules     text before the first observation
    invalid   reward of an answer that names no action; nothing else happens then
    """

    def __init__(
        self,
        name: str,
        *,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        describe: str | None = None,
        rules: str | None = None,
        invalid: float = -0.1,
    ) -> None:
        """Create the environment. Raises ConfigError if gymnasium has no such environment or its actions cannot be
        named."""
        self._env = _made(name, make or {})
        toy = TOYS.get(name.split("-")[0], NONE)
        self._describe: Describe = load(describe, "task.params.describe") if describe else toy.describe
        self._actions = _Actions(self._env.action_space, actions or toy.actions)
        told = toy.rules if rules is None else rules
        self._rules = "\n".join(part for part in (told, self._actions.help) if part)
        self._invalid = invalid

    def begin(self, seed: int) -> tuple[str, str]:
        """Start a new episode. Returns the first text and the name of the initial state."""
        observation, _ = self._env.reset(seed=seed)
        self._told = self._describe(self._env.unwrapped, observation)
        self._state = _name(observation)
        return f"{self._rules}\n{self._told}".strip(), self._state

    def reset(self, question: Question) -> None:
        """Start the episode of the question's seed. Returns nothing, because the question contains the first text."""
        self.begin(question["seed"])

    def step(self, action: str) -> Step:
        """Apply the action that the text names. A discrete observation is also the name of the state."""
        chosen = self._actions.read(action)
        if chosen is None:
            return Step(f"{self._actions.help}\n{self._told}", reward=self._invalid, state=self._state)
        observation, reward, ended, cut_off, _ = self._env.step(chosen)
        self._told, self._state = self._describe(self._env.unwrapped, observation), _name(observation)
        return Step(self._told, reward=float(reward), done=bool(ended or cut_off), state=self._state)

    def close(self) -> None:
        """Release the environment's resources."""
        self._env.close()


class _Actions:
    """Parser of text into actions."""

    def __init__(self, space: Any, words: Sequence[str]) -> None:
        from gymnasium.spaces import Discrete, Text

        self.help = ""
        self._numbers: dict[str, int] | None = None
        if isinstance(space, Text) and not words:
            return
        if not isinstance(space, Discrete):
            raise ConfigError("task.name", str(space), "Only environments with Discrete or Text actions can be played.")
        words = words or [str(number) for number in range(int(space.n))]
        named = {str(word).lower(): int(space.start) + place for place, word in enumerate(words)}
        if len(named) != space.n:
            raise ConfigError("task.params.actions", list(words), f"It needs {space.n} different words.")
        self._numbers = named
        self.help = f"Answer with one of: {', '.join(words)}."
        longest_first = sorted(map(re.escape, named), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)({'|'.join(longest_first)})(?!\w)", re.IGNORECASE)

    def read(self, text: str) -> Any:
        """Return the action that the text names last, or None."""
        if self._numbers is None:
            return text
        found = self._pattern.findall(text)
        return self._numbers[found[-1].lower()] if found else None


def _made(name: str, params: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("task.kind", "gymnasium", 'It is not installed: pip install "asyncrl[agents]".') from None
    try:
        return gymnasium.make(name, disable_env_checker=True, **params)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            "task.name / task.params.make", (name, dict(params)), f"gymnasium rejects it: {error}"
        ) from None


def _name(observation: Any) -> str:
    """Return the name of a discrete observation, or of a tuple of them; None for others."""
    import numpy

    if isinstance(observation, tuple):
        parts = [_name(part) for part in observation]
        return " ".join(parts) if all(parts) else ""
    return str(int(observation)) if isinstance(observation, int | numpy.integer) else ""
