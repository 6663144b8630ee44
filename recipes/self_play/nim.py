"""The game of Nim in the tiny model's vocabulary: each move is one digit, and a turn contains only what the player must
know."""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.envs.env import Question, Step
from asyncrl.schema import Message


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
