"""A game for tiny models, which 0.13M parameters learn from random weights in minutes.

Each move is one character. A turn contains only what the player must know, so a whole game has about 20 tokens.
"""

from __future__ import annotations

import random

from asyncrl.envs.env import Question, Step


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
