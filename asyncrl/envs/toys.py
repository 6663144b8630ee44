"""Games in the tiny model's vocabulary (digits only), which 0.13M parameters learn from random weights in minutes.

Each move is one digit. A turn contains only what the player must know, so a whole game has about 20 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.envs.env import Question, Step
from asyncrl.schema import Message


class HigherLower:
    """Game of finding a digit in `turns` guesses; after each guess the player learns whether the digit is higher (1) or
    lower (0). The reward is 1 for finding it. Anything but one digit ends the game with the reward `invalid`. Halving
    the remaining range finds each digit in 4 guesses."""

    inline = True

    def __init__(self, *, turns: int = 4, invalid: float = -0.1) -> None:
        self._turns, self._invalid = turns, invalid

    def question(self, index: int) -> Question:
        """Return the question of an index. The secret follows from the index; the text says nothing about it."""
        secret = random.Random(index).randrange(10)
        return {"messages": [{"role": "user", "content": " "}], "secret": secret, "seed": index, "state": "0-9"}

    def reset(self, question: Question) -> None:
        """Start the game. Returns no messages, because any digit may be the secret."""
        self._secret, self._left = question["secret"], self._turns
        self._low, self._high = 0, 9

    def finish(self) -> float:
        """Return the reward of an abandoned game: a truncated guess counts as an invalid one."""
        return self._invalid

    def step(self, action: str) -> Step:
        """Make a guess. The state is the remaining range."""
        self._left -= 1
        if len(action) != 1 or action not in "0123456789":
            return Step(reward=self._invalid, done=True)
        guess = int(action)
        if guess == self._secret:
            return Step(reward=1.0, done=True)
        if higher := self._secret > guess:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        return Step(str(int(higher)), done=not self._left, state=f"{self._low}-{self._high}")


class Nim:
    """Two players take 1 to 3 from a pile in turn and learn what is left; the player who takes the last one wins.

    Winning gives 1 and losing -1. An invalid move ends the game, with the reward `invalid` for its player and 0 for the
    other, who would otherwise learn from that mistake. Leaving a multiple of 4 wins, so player-0, who begins, can win
    from all initial piles.
    """

    inline = True
    roles = ("player-0", "player-1")
    PILES = (5, 6, 7, 9)

    def __init__(self, *, invalid: float = -1.0) -> None:
        self._invalid = invalid

    def question(self, index: int) -> Question:
        """Return a question: the pile and the player who begins."""
        pile = random.Random(index).choice(self.PILES)
        told = [{"role": "user", "content": str(pile)}]
        return {"messages": told, "pile": pile, "seed": index, "role": self.roles[0], "state": str(pile)}

    def reset(self, question: Question) -> None:
        """Start the game. Returns no messages, because the question contains everything."""
        self._pile: int = question["pile"]
        self._role, self._other = self.roles

    def step(self, action: str) -> Step:
        """Make a move for the player whose turn it is."""
        if action not in ("1", "2", "3") or int(action) > self._pile:
            return Step(rewards={self._role: self._invalid}, done=True)
        self._pile -= int(action)
        if not self._pile:
            return Step(rewards={self._role: 1.0, self._other: -1.0}, done=True)
        self._role, self._other = self._other, self._role
        return Step(str(self._pile), role=self._role, state=str(self._pile))


def nim_expert(messages: Sequence[Message]) -> str:
    """Opponent in Nim that wins whenever possible, and otherwise takes one."""
    return str(int(messages[-1]["content"]) % 4 or 1)
