"""Rewards that programs post to /v1/reward: for the episode, for single answers, and for their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from asyncrl.extensions.proxy.fields import Body
from asyncrl.extensions.proxy.messages import bad_field
from asyncrl.schema import Exchange, Turn


@dataclass(frozen=True)
class _OfTurn:
    reward: float
    token_rewards: list[float]


class Rewards:
    """The rewards of one session. A reward that is posted again replaces the previous one."""

    def __init__(self) -> None:
        self.episode: float | None = None
        self._turns: dict[int, _OfTurn] = {}  # by the number of the answer

    def take(self, body: Body, answered: Sequence[Exchange]) -> None:
        """Store a posted reward. Raises ApiError (400).

        The body {"reward": x} rewards the episode. With "turn", the number of an answer, it rewards that answer, and
        may also have "token_rewards", one for each of the answer's tokens.
        """
        turn, reward, tokens = body.get("turn"), body.get("reward"), body.get("token_rewards") or []
        if unknown := sorted(body.keys() - {"turn", "reward", "token_rewards"}):
            raise bad_field(unknown[0], body[unknown[0]], "Must be reward, turn or token_rewards.")
        if tokens and reward is None:
            reward = 0.0
        if not _is_number(reward):
            raise bad_field("reward", reward, "Must be a number.")
        if turn is None and not tokens:
            self.episode = float(reward)
            return
        if type(turn) is not int or not 0 <= turn < len(answered):
            raise bad_field("turn", turn, f"Must be that of an answer; there are {len(answered)}, from 0.")
        length = len(answered[turn].completion.token_ids)
        if not isinstance(tokens, list) or not all(map(_is_number, tokens)) or len(tokens) not in (0, length):
            raise bad_field("token_rewards", tokens, f"Must be {length} numbers, one for each token of the turn.")
        self._turns[turn] = _OfTurn(float(reward), [float(one) for one in tokens])

    def given(self, turns: Sequence[Turn], answered: Sequence[Exchange]) -> list[Turn]:
        """Return the turns with their rewards. `answered` are the answers from which they were made, by number."""
        of = {id(answered[number].completion): one for number, one in self._turns.items()}
        return [_with(turn, of.get(id(turn.completion))) for turn in turns]


def _with(turn: Turn, given: _OfTurn | None) -> Turn:
    if given is None:
        return turn
    return msgspec.structs.replace(turn, reward=given.reward, token_rewards=given.token_rewards)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)
