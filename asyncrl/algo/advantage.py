"""Advantage estimators: from the rewards of a batch to one number per trained token. A new estimator is one function.

Siblings are the episodes of one group, found by its number. Standard deviations are unbiased (ddof 1) and EPSILON is
added to them, as in slime and verl. If all values of a group are equal, what is left of them is exactly zero, whatever
the rounding of the mean. Whitening over a batch divides by sqrt(variance + WHITEN_EPSILON), like verl's
masked_whiten. A group whose rewards are all equal, or that has a single member, carries no signal: its group-relative
advantages are zero. Estimators that whiten over the batch subtract the mean over tokens from every token, also in such
a group. Tokens that the policy did not write (observations) are not in the table, so every recursion over tokens skips
them. Of torch this module only calls methods of tensors (algo/registry.py says why).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncrl import lookup
from asyncrl.algo.registry import AlgorithmRegistry
from asyncrl.settings import Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TokenTable

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageTraits:
    """Constraints on the use of an estimator."""

    alone: bool = False  # it works for a group of one
    whole_batch: bool = False  # it compares groups with each other
    critic: bool = False  # it needs values, so that a critic is trained
    unshaped: bool = False  # it needs the rewards as the task gave them


ADVANTAGES: AlgorithmRegistry[AdvantageTraits] = AlgorithmRegistry(
    "algo.advantage", AdvantageTraits(), offered=partial(lookup.offered, "advantages")
)
"""Estimators map the table and their settings to advantages, [N] float64."""


@ADVANTAGES.register(AdvantageTraits(alone=True))
def none(table: TokenTable) -> Tensor:
    """Return 0 for every token: rewards have no effect, and only the signal of an extension trains (distillation)."""
    return table.behaviour.new_zeros(table.num_tokens)


# -- whole episodes compared with their siblings ---------------------------------------------------------------


@ADVANTAGES.register()
def grpo(table: TokenTable) -> Tensor:
    """Return (R - mean) / (std + EPSILON): GRPO, arXiv 2402.03300, section 4.1.2."""
    groups = table.groups
    return groups.spread((groups.rewards - groups.mean()) / (groups.deviation() + EPSILON))


@ADVANTAGES.register()
def dr_grpo(table: TokenTable) -> Tensor:
    """Return R - mean: Dr. GRPO, arXiv 2503.20783, which omits the division because it biases towards easy and hard
    prompts."""
    groups = table.groups
    return groups.spread(groups.rewards - groups.mean())


@ADVANTAGES.register()
def rloo(table: TokenTable) -> Tensor:
    """Return R minus the mean of the others, n/(n-1) (R - mean): RLOO, arXiv 2402.14740."""
    groups = table.groups
    others = (groups.sizes - 1).clamp(min=1)
    return groups.spread((groups.rewards - groups.mean()) * groups.sizes / others)


@ADVANTAGES.register(AdvantageTraits(whole_batch=True))
def reinforce_pp_baseline(table: TokenTable) -> Tensor:
    """Return R - mean of the group, whitened over all tokens of the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(dr_grpo(table))


# -- turns and tokens ------------------------------------------------------------------------------------------


@ADVANTAGES.register(AdvantageTraits(alone=True, whole_batch=True))
def reinforce_pp(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return the discounted reward-to-go of each token, whitened over the tokens of the batch: REINFORCE++, arXiv
    2501.03262."""
    turns = table.turns
    return whiten(table.share * turns.tokens().to_go(turns.token_rewards(), discount))


def whiten(values: Tensor) -> Tensor:
    """Normalize to zero mean and unit variance over all tokens of the batch, so that a long sample weighs more than a
    short one."""
    if len(values) < 2 or bool((values == values[0]).all()):
        return values.new_zeros(len(values))
    return (values - values.mean()) / (values.var() + WHITEN_EPSILON).sqrt()


# -- statistics of groups --------------------------------------------------------------------------------------


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
