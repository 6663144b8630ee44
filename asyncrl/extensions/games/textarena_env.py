"""Games of textarena (https://github.com/LeonGuertler/TextArena) as environments for one or several players.

textarena draws everything from Python's global generator, so concurrent games would take each
other's numbers. Here each game has its own generator, seeded by its question: its modules get a stand-in for
`random` that passes every call to the generator of the current game.

Several games load word lists, which textarena downloads whenever such a game is created. Nothing is downloaded here:
the lists must be on disk, or the game is refused.

Rewards are the game's own, given once, at its end. One player: 1 for solving it, otherwise usually the fraction that
was reached; two consecutive invalid moves end most games. Two players: 1, 0 or -1. A game that is abandoned gives 0.
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
"""The changing part of the state of games that can reach a state again, by the first part of the game's name."""
REFUSALS = (ImportError, SyntaxError, TypeError, ValueError, AssertionError, LookupError, OSError)
"""Exceptions that textarena raises if it has no such game or cannot create it. Some games need a newer Python, an API
key, or files that it does not ship."""

BROKEN = ("Countdown", "Cryptarithm", "Slitherlink")
"""Games of textarena 0.7.4 that pass the arguments of their state in the wrong order: a move's text in place of its
kind, and a reason in place of the reward."""

_playing: ContextVar[random.Random | None] = ContextVar("_playing", default=None)
_drawing: set[str] = set()  # modules of games that use it


class Game:
    """One game, from its start to its end."""

    def __init__(self, name: str, params: Mapping[str, Any], players: int, seed: int) -> None:
        """Create the game. Raises ConfigError if textarena has no such game, or rejects the params or the number of
        players."""
        first = name.split("-")[0]
        self._name, self._draws, self._state = name, random.Random(seed), STATES.get(first)
        if first in BROKEN:
            raise ConfigError("task.name", name, "This game is broken in textarena 0.7.4: choose another.")
        try:
            with self._its_turn(), _nothing_downloaded():
                self._game = _made(name, params)
                self._core = _unwrapped(self._game)
                self._game.reset(num_players=players, seed=seed)
        except REFUSALS as error:
            raise _refusal(name, params, players, error) from error

    @property
    def player(self) -> int:
        """Number of the player whose turn it is."""
        return int(self._core.state.current_player_id)

    def step(self, action: str) -> bool:
        """Make a move for the player whose turn it is. Returns whether the game is over."""
        with self._its_turn():
            done, _ = self._game.step(action)
        return bool(done)

    def news(self, rules: str | None = None) -> str:
        """Return what the player whose turn it is has not read yet, except its own moves; `rules` replaces those of the
        game."""
        from textarena import GAME_ID, ObservationType

        player, told = self._core.get_observation()
        lines = []
        for sender, text, kind in told:
            if kind is ObservationType.PROMPT and rules is not None:
                lines.append(rules)
            elif kind is not ObservationType.PLAYER_ACTION:
                lines.append(text)
            elif sender not in (player, GAME_ID):  # games for one player label the move as the game's
                lines.append(f"[Player {sender}] {text}")
        return "\n".join(line.strip("\n") for line in lines)

    def rewards(self) -> dict[int, float]:
        """Return the rewards by player after the end of the game. Raises EpisodeFailed if they are not numbers, which
        is a defect of several games."""
        found, _ = self._game.close()
        try:
            return {player: float(reward) for player, reward in found.items()}
        except (AttributeError, ValueError, TypeError):
            raise EpisodeFailed("environment_error", f"{self._name} returned invalid rewards: {found!r}") from None

    @property
    def state(self) -> str:
        """Return the name of the state, including whether the next invalid move ends the game; empty if no state can be
        reached again."""
        if self._state is None:
            return ""
        return f"{self._core.state.game_state[self._state]} {self._core.state.error_count}"

    @contextmanager
    def _its_turn(self) -> Iterator[None]:
        """Let this game's generator answer draws inside the block."""
        token = _playing.set(self._draws)
        try:
            yield
        finally:
            _playing.reset(token)


class TextArenaGame:
    """Single-player game as an Env. `params` are the game's; `rules` replaces the game's own description, which is long
    for a small model."""

    def __init__(self, name: str, params: Mapping[str, Any] | None = None, rules: str | None = None) -> None:
        self._name, self._params, self._rules = name, params or {}, rules

    def begin(self, seed: int) -> tuple[str, str]:
        """Start a new game. Returns its first text and the name of its state."""
        self._game = Game(self._name, self._params, 1, seed)
        return self._game.news(self._rules), self._game.state

    def reset(self, question: Question) -> None:
        """Start the game of the question's seed. Returns no messages, because the question contains the first text."""
        self.begin(question["seed"])

    def step(self, action: str) -> Step:
        """Make a move: the text in [brackets], or the whole text if there are none."""
        if self._game.step(action):
            return Step(reward=self._game.rewards()[0], done=True)
        return Step(self._game.news(), state=self._game.state)


class TextArenaMatch:
    """Game of several players as an Env with the roles player-0, player-1 and so on. The parameters are those of
    TextArenaGame; the rules may contain {player}, which becomes the number of the reading player, and `system` precedes
    them."""

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
        """Start a new game. Returns the role that begins, and the text that it reads."""
        self._game = Game(self._name, self._params, len(self.roles), seed)
        self._met: set[int] = set()
        return self._next()

    def reset(self, question: Question) -> None:
        """Start the game of the question's seed. Returns no messages, because the question contains the first text."""
        self.begin(question["seed"])

    def step(self, action: str) -> Step:
        """Make a move for the player whose turn it is."""
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
    """Stand-in for the module `random` in textarena's modules. Outside of our games it behaves like that module."""

    def __getattr__(self, name: str) -> Any:
        game = _playing.get()
        return getattr(game if hasattr(game, name) else random, name)


def _made(name: str, params: Mapping[str, Any]) -> Any:
    """Create a game with copies of its arguments, because a game may change lists that the registry holds."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        like = sorted(known for known in ENV_REGISTRY if known.split("-")[0] == name.split("-")[0])
        raise ValueError("it has no such game" + (f", but {like}" if like else ""))
    spec = ENV_REGISTRY[name]
    _let_draw(spec.entry_point.partition(":")[0])
    return textarena.make(name, **copy.deepcopy({**spec.kwargs, **params}))


def _let_draw(module: str) -> None:
    """Make the modules of a game, and of textarena, draw from the current game's generator."""
    if module not in _drawing:
        importlib.import_module(module)
        for name, loaded in list(sys.modules.items()):
            if name.split(".")[0] == "textarena" and getattr(loaded, "random", None) is random:
                loaded.random = _Draws()  # type: ignore[attr-defined]
        _drawing.add(module)


def _unwrapped(game: Any) -> Any:
    """Return the game without its wrappers, because those for observations repeat everything at each turn."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


@contextmanager
def _nothing_downloaded() -> Iterator[None]:
    """Make nltk.download, which games call whenever they are created, look at the disk alone."""
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
    return ConfigError("task.name / task.params", name, f"textarena rejects it for {given}: {why}.")
