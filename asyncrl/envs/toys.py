"""Games in the tiny model's vocabulary, digits alone, that 0.13M parameters learn from random weights in minutes.

Each move is one digit. A turn says what the player must know and nothing else, so that a whole game has some 20 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.envs.env import Question, Step
from asyncrl.schema import Message


class HigherLower:
    """Find a digit in `turns` guesses, told after each whether it is higher (1) or lower (0). 1 for finding it, and
    `invalid`, at once the end, for anything but one digit. Halving what is left finds each in 4."""

    inline = True

    def __init__(self, *, turns: int = 4, invalid: float = -0.1) -> None:
        self._turns, self._invalid = turns, invalid

    def question(self, index: int) -> Question:
        """The secret is the same for the same index; the text tells nothing of it."""
        secret = random.Random(index).randrange(10)
        return {"messages": [{"role": "user", "content": " "}], "secret": secret, "seed": index, "state": "0-9"}

    def reset(self, question: Question) -> None:
        """Nothing to tell: any digit may be it."""
        self._secret, self._left = question["secret"], self._turns
        self._low, self._high = 0, 9

    def finish(self) -> float:
        """Of a game that is left: a guess that was cut off is as good as none."""
        return self._invalid

    def step(self, action: str) -> Step:
        """A guess. The state is what is left."""
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
    """Two players take 1 to 3 from a pile in turn, and are told what is left; who takes the last one wins.

    Winning gives 1 and losing -1; a move that is none gives `invalid` to who made it and 0 to the other, and ends the
    game: nobody learns from the mistakes of others. Who leaves a multiple of 4 wins, so player-0, who begins, can win
    from the piles that are dealt.
    """

    inline = True
    roles = ("player-0", "player-1")
    PILES = (5, 6, 7, 9)

    def __init__(self, *, invalid: float = -1.0) -> None:
        self._invalid = invalid

    def question(self, index: int) -> Question:
        """A pile, and who begins."""
        pile = random.Random(index).choice(self.PILES)
        told = [{"role": "user", "content": str(pile)}]
        return {"messages": told, "pile": pile, "seed": index, "role": self.roles[0], "state": str(pile)}

    def reset(self, question: Question) -> None:
        """The question tells all."""
        self._pile: int = question["pile"]
        self._role, self._other = self.roles

    def step(self, action: str) -> Step:
        """A move of whose turn it is."""
        if action not in ("1", "2", "3") or int(action) > self._pile:
            return Step(rewards={self._role: self._invalid}, done=True)
        self._pile -= int(action)
        if not self._pile:
            return Step(rewards={self._role: 1.0, self._other: -1.0}, done=True)
        self._role, self._other = self._other, self._role
        return Step(str(self._pile), role=self._role, state=str(self._pile))


def nim_expert(messages: Sequence[Message]) -> str:
    """An opponent in Nim who wins wherever that can be done, and otherwise takes one."""
    return str(int(messages[-1]["content"]) % 4 or 1)
