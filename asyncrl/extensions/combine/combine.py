"""Combinations of rewards: a weighted sum, and a gate.

The parts of a sum are named and appear under their names in the metrics, with their own parts below them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.extensions.combine.calls import combined, settled
from asyncrl.rewards.build import part
from asyncrl.rewards.reward import Result, Reward, RewardInput, Score, checked, close


class WeightedReward:
    """Weighted sum of rewards; rewards of turns are added likewise."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """`parts` maps names to {"use", "params", "weight"}, or to a pair of a reward and its weight. A weight defaults
        to 1 and may be negative."""
        if not parts:
            raise ConfigError("parts", parts, "Must name at least one reward.")
        self._parts = {name: _weighed(spec, f"parts.{name}") for name, spec in parts.items()}
        rewards = [reward for reward, _ in self._parts.values()]
        self.inline = all(reward.inline for reward in rewards)
        self.pure = all(reward.pure for reward in rewards)

    def __call__(self, answer: RewardInput) -> Score | Awaitable[Score]:
        """Score all parts, concurrently if they are async."""
        return combined([(answer, partial(reward, answer)) for reward, _ in self._parts.values()], self._sum)

    async def close(self) -> None:
        """Close all parts."""
        for reward, _ in self._parts.values():
            await close(reward)

    def _sum(self, scores: Sequence[Score]) -> Score:
        weights = [weight for _, weight in self._parts.values()]
        weighed = list(zip(scores, weights, strict=True))
        parts: dict[str, float] = {}
        for name, score in zip(self._parts, scores, strict=True):
            parts |= named(name, score)
        turns = [[weight * turn for turn in score.turns] for score, weight in weighed if score.turns]
        reward = math.fsum(score.reward * weight for score, weight in weighed)
        return Score(reward, [math.fsum(of_turn) for of_turn in zip(*turns, strict=True)], parts)


class GatedReward:
    """Product of two rewards. If the gate gives 0, the other reward is not asked, provided that this is known in
    time."""

    def __init__(self, gate: Any, reward: Any) -> None:
        """Both are rewards, or their {"use", "params"}."""
        self._gate, self._reward = part(gate, "gate"), part(reward, "reward")
        self.inline = self._gate.inline and self._reward.inline
        self.pure = self._gate.pure and self._reward.pure

    def __call__(self, answer: RewardInput) -> Score | Awaitable[Score]:
        """Ask the gate first. If the gate is async, a reward that needs a thread is asked immediately, because this
        call runs in one."""
        gate = self._gate(answer)
        if inspect.isawaitable(gate):
            return self._awaited(answer, gate, None if self._reward.inline else self._reward(answer))
        opened = checked(gate, answer)
        if not opened.reward:
            return _product(opened, None)
        return combined([(answer, partial(self._reward, answer))], lambda scores: _product(opened, scores[0]))

    async def close(self) -> None:
        """Close both rewards."""
        await close(self._gate)
        await close(self._reward)

    async def _awaited(self, answer: RewardInput, gate: Result, reward: Result | None) -> Score:
        opened = await settled(gate, answer)
        if reward is None and not opened.reward:
            return _product(opened, None)
        return _product(opened, await settled(self._reward(answer) if reward is None else reward, answer))


def named(name: str, score: Score) -> dict[str, float]:
    """Return a score and its parts under a name."""
    return {name: score.reward, **{f"{name}/{below}": value for below, value in score.parts.items()}}


def checked_weight(weight: object, field: str) -> float:
    """Return the weight of a part of a reward. Raises ConfigError if it is not a finite number."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{field}.weight", weight, "Must be a finite number.")
    return float(weight)


def _product(gate: Score, behind: Score | None) -> Score:
    parts = named("gate", gate)
    if behind is None:
        return Score(0.0, parts=parts)
    turns = [gate.reward * turn for turn in behind.turns]
    return Score(gate.reward * behind.reward, turns, parts | named("gated", behind))


def _weighed(spec: Any, field: str) -> tuple[Reward, float]:
    if isinstance(spec, Mapping):
        weight = spec.get("weight", 1.0)
        spec = {key: value for key, value in spec.items() if key != "weight"}
    else:
        spec, weight = spec
    return part(spec, field), checked_weight(weight, field)
