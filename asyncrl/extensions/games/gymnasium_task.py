"""A gymnasium environment as a task: question i is its episode with seed i."""

from __future__ import annotations

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.extensions.games.gymnasium_env import GymnasiumText
from asyncrl.schema import Message
from asyncrl.tasks import Question, Task


class Gymnasium(Task):
    """Task of one environment. `task.name` is its id, such as FrozenLake-v1. task.params are those of GymnasiumText
    (gymnasium_env.py), and `solved`, the lowest reward of an episode that counts as correct (default 0.5)."""

    def __init__(self, config: TaskConfig) -> None:
        params = dict(config.params)
        self._solved = params.pop("solved", 0.5)
        if not isinstance(self._solved, int | float):
            raise ConfigError("task.params.solved", self._solved, "Must be a number.")
        self.environment = EnvSpec(
            "asyncrl.extensions.games.gymnasium_env:GymnasiumText", {"name": config.name, **params}
        )
        """Environment of its episodes."""
        self._head: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self._shown: GymnasiumText = self.environment.make()

    def question(self, index: int) -> Question:
        """Return the rules and the first observation."""
        told, state = self._shown.begin(index)
        return {"messages": [*self._head, {"role": "user", "content": told}], "seed": index, "state": state}

    def correct(self, reward: float) -> bool:
        """Return whether the reward is `solved` or more."""
        return reward >= self._solved
