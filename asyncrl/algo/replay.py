"""Replay of past groups: drawn at random from a seed, equally on every rank, and never beyond the staleness bound. A
group that was trained as batch v may be trained again with batch w as long as every token of it was written by version
w - max_staleness or later: the bound holds for every trained token, also the second time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.schema import Group


class ReplayBuffer:
    """Replay buffer that draws `count` groups for each batch."""

    def __init__(self, count: int, max_staleness: int, seed: int) -> None:
        self._count, self._max_staleness, self._seed = count, max_staleness, seed
        self.kept: list[Group] = []
        """Groups that may be drawn."""
        self.reused = 0
        """Number of groups that were trained again so far."""

    def draw(self, version: int) -> list[Group]:
        """Draw groups for batch `version`. Call it before `keep` for that batch."""
        if not self._count:
            return []
        self.kept = [group for group in self.kept if max(group.staleness(version)) <= self._max_staleness]
        chance = random.Random(f"{self._seed} {version}")
        drawn = chance.sample(self.kept, min(self._count, len(self.kept)))
        self.reused += len(drawn)
        return drawn

    def keep(self, groups: Sequence[Group]) -> None:
        """Keep the groups of a batch that have a signal (their rewards differ) and in which every trajectory has
        tokens."""
        if self._count:
            self.kept += [
                group
                for group in groups
                if group.has_signal and all(trajectory.num_tokens for trajectory in group.trajectories)
            ]
