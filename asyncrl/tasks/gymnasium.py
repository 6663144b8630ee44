"""An environment of gymnasium as a task: question i is its episode of seed i."""

from __future__ import annotations

from asyncrl.config import Task as TaskConfig
from asyncrl.envs.env import EnvSpec
from asyncrl.envs.gymnasium import GymnasiumText
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question
from asyncrl.types import Message


class Gymnasium:
    """`task.name` is the environment's id, as in FrozenLake-v1. task.params: what GymnasiumText takes
    (asyncrl/envs/gymnasium.py), and `solved`, the least reward of an episode that counts as right (unset: 0.5)."""

    size = None
    inline = True

    def __init__(self, config: TaskConfig) -> None:
        params = dict(config.params)
        self._solved = params.pop("solved", 0.5)
        if not isinstance(self._solved, int | float):
            raise ConfigError("task.params.solved", self._solved, "Must be a number.")
        self.environment = EnvSpec("asyncrl.envs.gymnasium:GymnasiumText", {"name": config.name, **params})
        """What its episodes are played in."""
        self._head: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self._shown: GymnasiumText = self.environment.make()

    def question(self, index: int) -> Question:
        """The rules, and what is observed first."""
        told, state = self._shown.begin(index)
        return {"messages": [*self._head, {"role": "user", "content": told}], "seed": index, "state": state}

    def score(self, answer: str, question: Question) -> float:
        """Never asked: episodes come with their rewards."""
        raise TypeError("an environment rewards its own episodes")

    def correct(self, reward: float) -> bool:
        """`solved` or more."""
        return reward >= self._solved
