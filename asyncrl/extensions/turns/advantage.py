"""Turn-level credit assignment: the return of a turn compared with those of other turns.

Let G be the return from a turn on (the mean over its branches if the episode forks; algo/branches.py), b its baseline,
and w its share of the episode:

    A = w (G - b)

The sum over turns of A grad log pi has the policy gradient as its mean if, for every turn, b depends neither on what
the turn wrote nor on anything after it, and the same holds for the choice of terms in b. These baselines are therefore
unbiased, for any weighting of their terms:

    returns of other, separate episodes, whole or from a turn on, in any context
    returns of other turns in exactly the same context, no two of which lie on one branch
    any function of the past: the baseline of the previous turn, rewards so far

These are biased (tests/extensions/turns/test_unbiased.py shows it by enumeration):

    a mean that includes the turn's own return, if the number of turns that it is taken over varies
    returns normalized by turn index and then summed over the turns of an episode: the number of subtracted means
    depends on when the episode stops, so that every further turn costs the mean reward of a turn (grpo_turn; MT-GRPO,
    arXiv 2505.11821; verl #7244)
    zero advantage if there is nothing to compare with, for single turns of a group that has other episodes
    turns in one named state visited twice in one episode: the later return is credited to the earlier action (GiGPO)
    division by a standard deviation (grpo, GiGPO)

The factor w makes the result the policy gradient of episodes that do not fork: two branches from one context count as
half an episode each. The decision where to fork must not depend on what came after. All of this holds for discount 1.
With a discount, G is the discounted return, and the gradient is the one that policy-gradient methods commonly use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncrl.algo.advantage import ADVANTAGES, AdvantageTraits, group_sum, standardised
from asyncrl.settings import Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.branches import TurnTable
    from asyncrl.algo.table import TokenTable

ROUNDING = 1e-12  # relative to a group's largest return: a smaller difference counts as none


@ADVANTAGES.register()
def grpo_turn(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return process-supervised advantages: the sum of the rewards of the turn and of later turns, each normalized over
    all turns of the group (GRPO, arXiv 2402.03300, section 4.1.3). The reward of the episode belongs to its last
    turn."""
    turns = table.turns
    normal = standardised(turns.turn_rewards(), table.group[turns.owner])
    return table.share * turns.to_go(normal, discount)[turns.of_token]


@ADVANTAGES.register()
def turn_discounted(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return the return-to-go of each turn minus a baseline: the mean return of the group's other episodes from the
    turn of the same index on, or of whole episodes if none has that many turns. Discounted returns of turns are those
    of AReaL's turn_discount and of Kevin (arXiv 2507.11948), which normalize over all turns of a group, including the
    turn itself."""
    credit = _Credit(table, discount)
    return credit.advantages(credit.of_others())


@ADVANTAGES.register(AdvantageTraits(alone=True))
def turn_loo(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return the return-to-go of each turn minus the mean over the group's other turns in exactly the same context:
    first turns of one prompt, and branches of a fork. A prior estimate counts as one more term of the mean:
    turn_discounted's baseline plus the deviation of the parent turn's estimate from its own such baseline. It is the
    only term for a turn alone in its context. Without forks, and if contexts do not coincide by chance, this equals
    turn_discounted.

    Tree-GRPO (arXiv 2509.21240) and TreeRL (arXiv 2506.11902) compare within trees with values that include the turn's
    own return; VinePPO (arXiv 2410.01679) takes values from forks that it does not train on.
    """
    credit = _Credit(table, discount)
    turns, others = credit.turns, credit.of_others()
    count = group_sum(others.new_ones(len(others)), turns.context) - 1
    total = group_sum(credit.to_go, turns.context) - credit.to_go
    prior, level = others.tolist(), others.nan_to_num(0.0).tolist()  # without other episodes, every level is 0
    counts, totals, found = count.tolist(), total.tolist(), list[float]()
    for number, parent in enumerate(turns.parent.tolist()):
        known = level[number] + found[parent] - level[parent] if parent >= 0 else prior[number]
        if math.isnan(known):
            found.append(totals[number] / counts[number] if counts[number] else math.nan)
        else:
            found.append((totals[number] + known) / (counts[number] + 1))
    return credit.advantages(others.new_tensor(found))


def depths(turns: TurnTable) -> Tensor:
    """Return the number of turns before each turn on its branch, [M]."""
    found = list[int]()
    for parent in turns.parent.tolist():
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return turns.parent.new_tensor(found)


class _Credit:
    """Turns with their returns, and the returns of other episodes of the group."""

    def __init__(self, table: TokenTable, discount: float) -> None:
        self.turns = turns = table.turns
        self.group = table.group[turns.owner]
        self.to_go = turns.to_go(turns.turn_rewards(), discount)
        self._table = table

    def of_others(self) -> Tensor:
        """Return the mean return of other episodes of the group from the turn of the same index on, [M]; of whole
        episodes if none has that many turns; NaN if there are no other episodes."""
        turns, depth = self.turns, depths(self.turns)
        span = int(depth.max()) + 1 if len(depth) else 1
        same, own = self.group * span + depth, turns.owner * span + depth
        weighed, ones = turns.share * self.to_go, self.to_go.new_ones(len(self.to_go))
        share = group_sum(turns.share, same) - group_sum(turns.share, own)
        found = (group_sum(weighed, same) - group_sum(weighed, own)) / share
        return found.where(group_sum(ones, same) > group_sum(ones, own), self._whole())

    def _whole(self) -> Tensor:
        """Return the mean return of whole other episodes, [M]."""
        turns, group = self.turns, self._table.group
        begins = turns.parent < 0
        whole = self.to_go.new_zeros(len(group))
        whole = whole.index_add(0, turns.owner[begins], (turns.part * self.to_go)[begins])
        played = whole.new_zeros(len(whole)).index_fill(0, turns.owner, 1.0)
        others = group_sum(played, group) - 1.0
        return ((group_sum(whole, group) - whole) / others).where(others > 0, math.nan)[turns.owner]

    def advantages(self, baseline: Tensor) -> Tensor:
        """Compute the advantages of tokens from a baseline, [M] -> [N]: zero without a baseline, and exactly zero if
        returns differ only by rounding."""
        found = self.to_go - baseline
        size = self.to_go.new_zeros(int(self.group.max()) + 1 if len(self.group) else 0)
        size = size.scatter_reduce(0, self.group, self.to_go.abs(), "amax")[self.group]
        found = found.where((found.abs() > ROUNDING * size) & ~found.isnan(), 0.0)
        return (self.turns.share * found)[self.turns.of_token]
