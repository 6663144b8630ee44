"""The latest steps of a run, for the controller of elastic runs (elastic.py): how long the trainer waits, whether the
engines keep up with it, and how lengths grow.

A trainer does not wait while it trains what was ready before, even if the engines make less than it trains. So the
window also counts what they made.

Pure: no I/O, and no clock but the times of the observations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import LengthSample

WINDOW = 24
"""Number of latest steps over which times are averaged, at most."""
TREND = 64
"""Number of latest steps from which the growth of lengths is taken, at most; WINDOW steps are needed to see that there
is none."""
FEWEST = 8
"""Number of steps without which growth counts as none."""
CHANCE = 1.0
"""Batches by which what the engines made may fall behind by chance."""


@dataclass(frozen=True)
class StepObservation:
    """What a run measured in one step."""

    step: int
    time: float
    """Time at which it ended."""
    seconds: float
    waited: float
    """Seconds for which the trainer waited for the batch."""
    paused: float
    """Seconds for which the engines were paused."""
    tokens: float
    """Tokens of the batch."""
    engines: int
    """Number of engines that serve."""
    groups: Sequence[Sequence[tuple[float, float]]] = ()
    """Groups that have ended since the step before: tokens, and seconds in environments, of each episode."""
    shape: EngineShape | None = None
    """Speed of an engine as measured; None: as before."""
    lead: int | None = None
    """Lead in force; None: as decided."""
    turns: float = 1.0
    """Mean number of turns of an episode."""
    made: float = 1.0
    """Batches of episodes that have ended since the step before."""
    prompt: float | None = None
    """Mean tokens of a prompt; None: as before."""


class StepWindow:
    """Steps measured under the same setting, and the lengths of all."""

    def __init__(self) -> None:
        self._steps: deque[StepObservation] = deque(maxlen=WINDOW)
        self._lengths: deque[tuple[int, int, float]] = deque(maxlen=TREND)  # step, episodes, mean logarithm of tokens
        self.growth = 0.0
        """Growth of lengths per step, as a logarithm."""

    def __iter__(self) -> Iterator[StepObservation]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, seen: StepObservation) -> None:
        """Add a step."""
        self._steps.append(seen)

    def add_lengths(self, seen: StepObservation) -> None:
        """Add the lengths of a step, and measure their growth anew."""
        logs = [math.log(max(1.0, tokens)) for group in seen.groups for tokens, _ in group]
        if logs:
            self._lengths.append((seen.step, len(logs), sum(logs) / len(logs)))
            self.growth = self._slope() if len(self._lengths) >= FEWEST else 0.0

    def clear(self) -> None:
        """Forget the steps, but not how lengths grow."""
        self._steps.clear()

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(one.seconds for one in self._steps)

    @property
    def turns(self) -> float:
        """Mean number of turns of an episode."""
        return sum(one.turns for one in self._steps) / len(self._steps)

    @property
    def prompt(self) -> float | None:
        """Mean tokens of a prompt in the steps that tell; None if there is none."""
        told = [one.prompt for one in self._steps if one.prompt is not None]
        return sum(told) / len(told) if told else None

    @property
    def waits(self) -> float:
        """Share of the time for which the trainer waits."""
        return sum(one.waited for one in self._steps) / self.seconds

    @property
    def made(self) -> float:
        """Batches that the engines made for each that was trained, with CHANCE; at most 1."""
        return min(1.0, (sum(one.made for one in self._steps) + CHANCE) / len(self._steps))

    @property
    def lacks(self) -> float:
        """Share of the time for which the trainer would wait without the batches that were ready before."""
        return 1 - (1 - self.waits) * self.made

    @property
    def trend_known(self) -> bool:
        """Whether there are enough steps to say that lengths do not grow."""
        return len(self._lengths) >= WINDOW

    def grown(self, sample: LengthSample, steps: int) -> LengthSample:
        """Return the lengths that are expected so many steps later, of which none is longer than the longest so far:
        it may have been cut off."""
        if not self.growth:
            return sample
        tokens = np.minimum(sample.tokens * math.exp(self.growth * steps), sample.tokens.max())
        return LengthSample(tokens, sample.seconds, sample.turns)

    def _slope(self) -> float:
        """Return the slope of a line through the mean logarithms, less its standard error; at least 0."""
        steps, weights, logs = (np.array(column, float) for column in zip(*self._lengths, strict=True))
        x, y = steps - np.average(steps, weights=weights), logs - np.average(logs, weights=weights)
        spread = float((weights * x**2).sum())
        slope = float((weights * x * y).sum()) / spread
        error = math.sqrt(float((weights * (y - slope * x) ** 2).sum()) / (len(x) - 2) / spread)
        return max(0.0, slope - error)
