"""Past groups that are trained again: drawn by a seeded chance, the same on every rank, and never older than the
staleness bound allows. A group that was trained as batch v may come again with batch w as long as every token of it was
written by version w - max_staleness or later: the bound holds for every trained token, also the second time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncrl.types import Group


class Replay:
    """Draws `count` groups for each batch."""

    def __init__(self, count: int, max_staleness: int, seed: int) -> None:
        self._count, self._max_staleness, self._seed = count, max_staleness, seed
        self.kept: list[Group] = []
        """Groups that may be drawn."""
        self.reused = 0
        """Groups that were trained again so far."""

    def draw(self, version: int) -> list[Group]:
        """For batch `version`, before `keep` was called for it."""
        if not self._count:
            return []
        self.kept = [group for group in self.kept if max(group.staleness(version)) <= self._max_staleness]
        chance = random.Random(f"{self._seed} {version}")
        drawn = chance.sample(self.kept, min(self._count, len(self.kept)))
        self.reused += len(drawn)
        return drawn

    def keep(self, groups: Sequence[Group]) -> None:
        """After a batch: those that can teach something (their rewards differ), and that have tokens at all."""
        if self._count:
            self.kept += [
                group
                for group in groups
                if group.has_signal and all(trajectory.num_tokens for trajectory in group.trajectories)
            ]
