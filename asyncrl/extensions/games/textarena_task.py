"""Games of textarena as a task: question i is the game with seed i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.extensions.games.textarena_env import TextArenaGame, TextArenaMatch
from asyncrl.schema import Message
from asyncrl.tasks import Question, Task

ENVS = "asyncrl.extensions.games.textarena_env"


class TextArena(Task):
    """Task of one game. `task.name` is the game's, such as GuessTheNumber-v0. task.params: `players` (default 1),
    `rules` (default: the game's own description), and the game's own parameters. Rewards: textarena_env.py."""

    def __init__(self, config: TaskConfig) -> None:
        params = dict(config.params)
        players, rules = params.pop("players", 1), params.pop("rules", None)
        if not isinstance(players, int) or players < 1:
            raise ConfigError("task.params.players", players, "Must be a number from 1.")
        game: dict[str, Any] = {"name": config.name, "params": params, "rules": rules}
        self._head: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
        self.roles: Sequence[str] = ()
        """Roles, in a game of several players."""
        self.environment = EnvSpec(f"{ENVS}:TextArenaGame", game)
        """Environment of its episodes."""
        if players > 1:
            game |= {"players": players, "system": config.system}
            self.environment = EnvSpec(f"{ENVS}:TextArenaMatch", game)
            self.roles = self.environment.make().roles
        self.question(0)  # fail here if textarena refuses the game

    def question(self, index: int) -> Question:
        """Return the first message of the game with this seed, to the player who begins."""
        env: TextArenaGame | TextArenaMatch = self.environment.make()
        if isinstance(env, TextArenaMatch):
            first = env.begin(index)
            return {"messages": first.messages, "seed": index, "role": first.role, "state": first.state}
        news, state = env.begin(index)
        return {"messages": [*self._head, {"role": "user", "content": news}], "seed": index, "state": state}
