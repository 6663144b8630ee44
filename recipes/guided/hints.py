"""Guide for the game of the experiment."""

from __future__ import annotations

from asyncrl.envs.env import Question
from asyncrl.schema import Message


def half(question: Question, chat: list[Message]) -> str:
    """Return the half of the digits that contains the secret one: 1 for 5 to 9, 0 for 0 to 4."""
    return str(int(question["secret"] > 4))
