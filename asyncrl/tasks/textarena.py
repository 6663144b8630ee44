"""Games of textarena as a task: question i is the game of seed i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import Task as TaskConfig
from asyncrl.envs.env import EnvSpec
from asyncrl.envs.textarena import TextArenaGame, TextArenaMatch
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question
from asyncrl.types import Message

ENVS = "asyncrl.envs.textarena"


class TextArena:
    """`task.name` is the game's, as in GuessTheNumber-v0. task.params: `players` (unset: 1), `rules` (unset: what the
    game says of itself), and what the game takes. Rewards: asyncrl/envs/textarena.py."""

    size = None
    inline = True

    def __init__(self, config: TaskConfig) -> None:
        params = dict(config.params)
        players, rules = params.pop("players", 1), params.pop("rules", None)
        if not isinstance(players, int) or players < 1:
            raise ConfigError("task.params.players", players, "Must be a number from 1.")
        game: dict[str, Any] = {"name": config.name, "params": params, "rules": rules}
        self._head: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self.roles: Sequence[str] = ()
        """Of a game of several players."""
        self.environment = EnvSpec(f"{ENVS}:TextArenaGame", game)
        """What its episodes are played in."""
        if players > 1:
            game |= {"players": players, "system": config.system}
            self.environment = EnvSpec(f"{ENVS}:TextArenaMatch", game)
            self.roles = self.environment.make().roles
        self.question(0)  # what textarena refuses, it refuses here

    def question(self, index: int) -> Question:
        """What the game of this seed tells first, to who begins."""
        env: TextArenaGame | TextArenaMatch = self.environment.make()
        if isinstance(env, TextArenaMatch):
            first = env.begin(index)
            return {"messages": first.messages, "seed": index, "role": first.role, "state": first.state}
        news, state = env.begin(index)
        return {"messages": [*self._head, {"role": "user", "content": news}], "seed": index, "state": state}

    def score(self, answer: str, question: Question) -> float:
        """Never asked: episodes come with their rewards."""
        raise TypeError("a game rewards its own episodes")

    def correct(self, reward: float) -> bool:
        """Solved, or won."""
        return reward >= 1.0
