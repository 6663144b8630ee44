"""Per-group statistics of rewards and other values. Siblings are found by their group's number.

Standard deviations are unbiased (ddof 1), and EPSILON is added to them, as in slime and verl. If all values of a group
are equal, the result is exactly zero, whatever the rounding of the mean. Of torch this module only calls methods of
tensors (algo/registry.py says why).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6


class GroupStatistics:
    """Rewards of episodes with the statistics of each one's group, all [E]."""

    def __init__(self, rewards: Tensor, group: Tensor, owner: Tensor) -> None:
        """`rewards` include those of turns and tokens; `owner` is the episode of each token, [N]."""
        self.rewards, self._group, self._owner = rewards, group, owner
        self.sizes = self.total(self.rewards.new_ones(len(self.rewards)))

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group."""
        return group_sum(values, self._group)

    def mean(self) -> Tensor:
        """Return the mean reward of the group."""
        return self.total(self.rewards) / self.sizes

    def deviation(self) -> Tensor:
        """Return the unbiased standard deviation of the group's rewards; 0 for a single sample."""
        squares = self.total((self.rewards - self.mean()) ** 2)
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def spread(self, advantages: Tensor) -> Tensor:
        """Expand to tokens, [E] -> [N], with zero in groups whose rewards are all equal (rounding may make their mean
        differ)."""
        return advantages.where(differs(self.rewards, self._group), 0.0)[self._owner]


def centred(values: Tensor, group: Tensor) -> Tensor:
    """Return v - mean within each group; zero if all are equal."""
    mean = group_sum(values, group) / group_sum(values.new_ones(len(values)), group)
    return (values - mean).where(differs(values, group), 0.0)


def standardised(values: Tensor, group: Tensor) -> Tensor:
    """Return (v - mean) / (std + EPSILON) within each group; zero if all are equal."""
    count, distance = group_sum(values.new_ones(len(values)), group), centred(values, group)
    return distance / ((group_sum(distance**2, group) / (count - 1).clamp(min=1)).sqrt() + EPSILON)


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Return, for each value, the sum over its group."""
    sums = values.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, values)
    return sums[group]


def differs(values: Tensor, group: Tensor) -> Tensor:
    """Return, for each value, whether its group holds two different values."""
    size = int(group.max()) + 1 if len(group) else 0
    lowest = values.new_full((size,), math.inf).scatter_reduce(0, group, values, "amin")
    highest = values.new_full((size,), -math.inf).scatter_reduce(0, group, values, "amax")
    return (lowest < highest)[group]
