"""Games of textarena (https://github.com/LeonGuertler/TextArena) as environments: alone, or several players in turn.

textarena draws everything from Python's one global generator, and games that play at the same time would take each
other's numbers. Here a game has a generator of its own, seeded by its question: its modules are given a stand-in for
`random`, which passes every call to the generator of the game that is being played.

Several games load word lists, which textarena downloads whenever they are made. Nothing is downloaded here: the lists
are on disk, or the game is refused.

Rewards are the game's own, given once, when it is over. Alone: 1 for solving it, most often the share that was reached
else; two invalid moves in a row end most games. Two players: 1, 0 or -1. A game that is left before its end gives 0.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from asyncrl.envs.env import Question, Step
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.schema import Message

STATES = {
    "ConnectFour": "board",
    "FrozenLake": "player_pos",
    "Nim": "piles",
    "TicTacToe": "board",
    "TowerOfHanoi": "towers",
}
"""Of games whose state can be reached again: the part of it that changes, by the first part of the game's name."""
REFUSALS = (ImportError, SyntaxError, TypeError, ValueError, AssertionError, LookupError, OSError)
"""What is raised where textarena has no such game, or cannot make it so. Some need a newer Python, an API key, or files
that it does not ship."""

BROKEN = ("Countdown", "Cryptarithm", "Slitherlink")
"""Games of textarena 0.7.4 that give its state their arguments in a wrong order: a move's text comes where its kind
belongs, and a reason where the reward does."""

_playing: ContextVar[random.Random | None] = ContextVar("_playing", default=None)
_drawing: set[str] = set()  # modules of games that draw from it


class Game:
    """One game, from its start to its end."""

    def __init__(self, name: str, params: Mapping[str, Any], players: int, seed: int) -> None:
        """Raises ConfigError where textarena has no such game, or does not take the params or the players."""
        first = name.split("-")[0]
        self._name, self._draws, self._state = name, random.Random(seed), STATES.get(first)
        if first in BROKEN:
            raise ConfigError("task.name", name, "This game is broken in textarena 0.7.4: take another.")
        try:
            with self._its_turn(), _nothing_downloaded():
                self._game = _made(name, params)
                self._core = _unwrapped(self._game)
                self._game.reset(num_players=players, seed=seed)
        except REFUSALS as error:
            raise _refusal(name, params, players, error) from error

    @property
    def player(self) -> int:
        """Whose turn it is."""
        return int(self._core.state.current_player_id)

    def step(self, action: str) -> bool:
        """A move of the player whose turn it is; whether the game is over."""
        with self._its_turn():
            done, _ = self._game.step(action)
        return bool(done)

    def news(self, rules: str | None = None) -> str:
        """What the player whose turn it is has not read yet, its own moves apart; `rules` replace those of the game."""
        from textarena import GAME_ID, ObservationType

        player, told = self._core.get_observation()
        lines = []
        for sender, text, kind in told:
            if kind is ObservationType.PROMPT and rules is not None:
                lines.append(rules)
            elif kind is not ObservationType.PLAYER_ACTION:
                lines.append(text)
            elif sender not in (player, GAME_ID):  # games for one player take the move for the game's
                lines.append(f"[Player {sender}] {text}")
        return "\n".join(line.strip("\n") for line in lines)

    def rewards(self) -> dict[int, float]:
        """By player, of a game that is over. EpisodeFailed where they are no numbers: the fault of several games."""
        found, _ = self._game.close()
        try:
            return {player: float(reward) for player, reward in found.items()}
        except (AttributeError, ValueError, TypeError):
            raise EpisodeFailed("environment_error", f"{self._name} gives {found!r} as rewards") from None

    @property
    def state(self) -> str:
        """Names the state, with whether the next invalid move ends the game; empty where none can be reached again."""
        if self._state is None:
            return ""
        return f"{self._core.state.game_state[self._state]} {self._core.state.error_count}"

    @contextmanager
    def _its_turn(self) -> Iterator[None]:
        """To draw."""
        token = _playing.set(self._draws)
        try:
            yield
        finally:
            _playing.reset(token)


class TextArenaGame:
    """A single-player game as an Env. `params` are the game's; `rules` take the place of what it says of itself, which
    is long for a small model."""

    def __init__(self, name: str, params: Mapping[str, Any] | None = None, rules: str | None = None) -> None:
        self._name, self._params, self._rules = name, params or {}, rules

    def begin(self, seed: int) -> tuple[str, str]:
        """A new game: what it tells first, and the name of its state."""
        self._game = Game(self._name, self._params, 1, seed)
        return self._game.news(self._rules), self._game.state

    def reset(self, question: Question) -> None:
        """The game of the question's seed, of which the question tells already."""
        self.begin(question["seed"])

    def step(self, action: str) -> Step:
        """A move: what stands in [brackets], or all of the text where there are none."""
        if self._game.step(action):
            return Step(reward=self._game.rewards()[0], done=True)
        return Step(self._game.news(), state=self._game.state)


class TextArenaMatch:
    """A game of several players as an Env of the roles player-0, player-1 and so on. As for one player; the rules may
    say {player} where the number of who reads them belongs, and `system` comes before them."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rules: str | None = None,
        *,
        players: int = 2,
        system: str | None = None,
    ) -> None:
        self._name, self._params, self._rules = name, params or {}, rules
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.roles = [_role(player) for player in range(players)]

    def begin(self, seed: int) -> Step:
        """A new game: who begins, and what it is told."""
        self._game = Game(self._name, self._params, len(self.roles), seed)
        self._met: set[int] = set()
        return self._next()

    def reset(self, question: Question) -> None:
        """The game of the question's seed, of which the question tells already."""
        self.begin(question["seed"])

    def step(self, action: str) -> Step:
        """A move of the player whose turn it is."""
        if self._game.step(action):
            return Step(rewards={_role(player): reward for player, reward in self._game.rewards().items()}, done=True)
        return self._next()

    def _next(self) -> Step:
        player = self._game.player
        head = [] if player in self._met else self._system
        self._met.add(player)
        rules = self._rules.replace("{player}", str(player)) if self._rules is not None else None
        news: Message = {"role": "user", "content": self._game.news(rules)}
        return Step([*head, news], role=_role(player), state=self._game.state)


def _role(player: int) -> str:
    return f"player-{player}"


class _Draws:
    """Stands for the module `random` in textarena's modules. Where no game of ours plays, it is that module."""

    def __getattr__(self, name: str) -> Any:
        game = _playing.get()
        return getattr(game if hasattr(game, name) else random, name)


def _made(name: str, params: Mapping[str, Any]) -> Any:
    """Its arguments are copies: a game may change lists that the registry holds."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        like = sorted(known for known in ENV_REGISTRY if known.split("-")[0] == name.split("-")[0])
        raise ValueError("it has no such game" + (f", but {like}" if like else ""))
    spec = ENV_REGISTRY[name]
    _let_draw(spec.entry_point.partition(":")[0])
    return textarena.make(name, **copy.deepcopy({**spec.kwargs, **params}))


def _let_draw(module: str) -> None:
    """The modules of a game, and of textarena, draw from the game that is being played."""
    if module not in _drawing:
        importlib.import_module(module)
        for name, loaded in list(sys.modules.items()):
            if name.split(".")[0] == "textarena" and getattr(loaded, "random", None) is random:
                loaded.random = _Draws()  # type: ignore[attr-defined]
        _drawing.add(module)


def _unwrapped(game: Any) -> Any:
    """Without its wrappers: those for observations tell anew, at each turn, what was told before."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


@contextmanager
def _nothing_downloaded() -> Iterator[None]:
    """nltk.download, which games call whenever they are made, looks at the disk alone."""
    import nltk

    def find(names: str | list[str], *_: Any, **__: Any) -> bool:
        for name in [names] if isinstance(names, str) else names:
            nltk.data.find(f"{'taggers' if 'tagger' in name else 'corpora'}/{name}")
        return True

    download, nltk.download = nltk.download, find
    try:
        yield
    finally:
        nltk.download = download


def _refusal(name: str, params: Mapping[str, Any], players: int, error: Exception) -> ConfigError:
    if isinstance(error, LookupError) and "NLTK" in str(error):
        remedy = "Its word lists are not on disk: python -m nltk.downloader words averaged_perceptron_tagger_eng."
        return ConfigError("task.name", name, remedy)
    if isinstance(error, ImportError) and error.name in ("textarena", "nltk"):
        return ConfigError("task.kind", "textarena", 'It is not installed: pip install "asyncrl[agents]".')
    given = f"{players} player(s)" + (f" and {dict(params)}" if params else "")
    why = str(error).strip(" .") or type(error).__name__
    return ConfigError("task.name / task.params", name, f"textarena refuses it for {given}: {why}.")
