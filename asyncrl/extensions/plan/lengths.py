"""Synthetic workloads with realistic answer lengths, log-normal and correlated within a group, and slow environments.

The parameters follow measurements published for other systems: reasoning answers have sigma 0.9, or 1.3 with a heavy
tail; an agent's tokens are split over its turns, and its tools take log-normal times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from asyncrl.extensions.plan.simulation import SimulatedEpisode


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths with a cutoff; the same group number always yields the same episodes."""

    mean: float
    """Mean number of tokens of an episode, before the cutoff."""
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int
    group_size: int
    alike: float = 0.5
    """Fraction of the logarithm's variance that the siblings of a group share."""
    turns: float = 1.0
    """Mean number of turns (geometric)."""
    tool_seconds: float = 0.0
    """Mean seconds between two turns."""
    tool_sigma: float = 1.2
    tool_longest: float = 600.0
    most_turns: int = 60
    seed: int = 0
    growth: float = 1.0
    """Factor by which lengths grow, evenly in the logarithm, over the first `growth_groups` groups."""
    growth_groups: int = 1

    def group(self, number: int) -> list[SimulatedEpisode]:
        """Return the episodes of group `number`."""
        draw = random.Random(f"{self.seed} {number}")
        common = draw.gauss() * math.sqrt(self.alike)
        grown = math.log(self.growth) * min(1.0, number / self.growth_groups)
        own = (draw.gauss() * math.sqrt(1 - self.alike) for _ in range(self.group_size))
        return [self._episode(draw, common + one, grown) for one in own]

    def _episode(self, draw: random.Random, deviation: float, grown: float) -> SimulatedEpisode:
        centre = math.log(self.mean) + grown - self.sigma**2 / 2
        tokens = max(1, min(self.longest, round(math.exp(centre + self.sigma * deviation))))
        turns = self._turns(draw)
        shares = [draw.gammavariate(2.0, 1.0) for _ in range(turns)]
        ends = [round(tokens * sum(shares[: i + 1]) / sum(shares)) for i in range(turns)]
        written = [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]
        return SimulatedEpisode(written, [self._seconds(draw) for _ in range(turns - 1)])

    def _turns(self, draw: random.Random) -> int:
        if self.turns <= 1:
            return 1
        ratio = math.log(1 - draw.random()) / math.log(1 - 1 / self.turns)
        return min(self.most_turns, max(1, math.ceil(ratio)))

    def _seconds(self, draw: random.Random) -> float:
        if not self.tool_seconds:
            return 0.0
        centre = math.log(self.tool_seconds) - self.tool_sigma**2 / 2
        return min(self.tool_longest, math.exp(draw.gauss(centre, self.tool_sigma)))

    def episodes(self) -> Callable[[int], Sequence[SimulatedEpisode]]:
        """Return a memoized `group`."""
        return lru_cache(maxsize=None)(self.group)
