"""Process rewards: any reward applied to every turn of an episode, as it stood when that turn had been written.

With `into` set to min, mean, sum or last, the episode's reward is computed from them. With turns, they become the
rewards of the turns, and the episode's own reward is 0. Never both: algorithms that use only whole episodes add the
two. About min: a chain is as good as its weakest step (Lightman et al., arXiv 2305.20050, take the product or the
minimum).
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from asyncrl.extensions.combine.calls import combined
from asyncrl.rewards.build import part
from asyncrl.rewards.reward import RewardInput, Score, close

INTO: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": statistics.fmean,
    "sum": sum,
    "last": lambda steps: steps[-1],
}


class ProcessReward:
    """Applies a function, a reward model or a judge to each turn."""

    def __init__(self, step: Any, into: Literal["turns", "min", "mean", "sum", "last"] = "turns") -> None:
        """`step` is a reward, or its {"use", "params"}."""
        self._step = part(step, "step")
        self._into = INTO.get(into)
        self.inline, self.pure = self._step.inline, self._step.pure

    def __call__(self, answer: RewardInput) -> Score | Awaitable[Score]:
        """Score all turns, concurrently if the step's reward is async."""
        states = [answer.until(turn) for turn in range(len(answer.texts))]
        return combined([(state, partial(self._step, state)) for state in states], self._made_of)

    async def close(self) -> None:
        """Close the step's reward."""
        await close(self._step)

    def _made_of(self, scores: Sequence[Score]) -> Score:
        steps = [score.reward for score in scores]
        names = {name for score in scores for name in score.parts}
        parts = {
            name: statistics.fmean(score.parts[name] for score in scores if name in score.parts)
            for name in sorted(names)
        }
        parts["steps/lowest"] = min(steps)
        return Score(0.0, steps, parts) if self._into is None else Score(float(self._into(steps)), parts=parts)
