"""Which turn has earned what: turns of episodes beside those of others.

With G the return from a turn on (the mean over its ways, where the episode forks; algo/turns.py), b what it is compared
with, and w its share of the episode,

    A = w (G - b)      sum over turns of A grad log pi has the policy gradient as its mean if, for every turn,

b does not depend on what the turn wrote, nor on anything that came after it, and neither does which terms b has.
So these are unbiased, each weighed as you like, in whatever contexts the others stand:

    others' returns, of whole episodes or from a turn on, where "others" are episodes of their own        (any context)
    returns of other turns in one exact context, none of which stands behind another on one way
    whatever is made of the past: the baseline of the turn before, rewards up to here

and these are not (tests/algo/test_unbiased.py, by enumeration):

    the mean with the turn's own return in it, where the number of turns that it is taken over varies
    returns normalised by turn index and then added up over the turns that an episode has: how many means are taken off
    depends on when it stops, so that every further turn costs the mean reward of a turn (grpo_turn; MT-GRPO, arXiv
    2505.11821; verl #7244)
    no advantage where there is nothing to compare with, for single turns of a group that has other episodes
    turns in one named state met twice in one episode: the later return answers for the earlier action (gigpo)
    division by a deviation (grpo, gigpo)

w is what makes it the policy gradient of episodes that do not fork: two ways from one context are half an episode each.
Where to fork must not be decided by what came after. All of this holds for discount 1; below, G is the discounted
return, and the gradient the one that policy-gradient methods with a discount commonly take.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncrl.algo.siblings import EPSILON, Groups, centred, group_sum, standardised
from asyncrl.algo.table import TokenTable
from asyncrl.algo.turns import turn_rewards, turns_of

if TYPE_CHECKING:
    from asyncrl.algo.advantage import AdvantageParams

ROUNDING = 1e-12  # of a group's largest return: a difference below is none


def turn_discounted(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return from each turn on, less the mean return of the group's other episodes from a turn of the same number on;
    where none came so far, less that of whole episodes. Discounted returns of turns are those of AReaL's turn_discount
    and of Kevin (arXiv 2507.11948), which normalise over all turns of a group, the own one included."""
    credit = _Credit(table, params.discount)
    return credit.advantages(credit.of_others())


def turn_loo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return from each turn on, less the mean over the group's other turns in exactly the same context: first turns of
    one prompt, and ways from a fork. What is known without them counts as one more: turn_discounted's baseline, and how
    far that of the turn before was from it. It is all there is for a turn alone in its context; so without forks, and
    where contexts do not meet by chance, this is turn_discounted.

    Tree-GRPO (arXiv 2509.21240) and TreeRL (arXiv 2506.11902) compare within trees with values that the own return is
    part of; VinePPO (arXiv 2410.01679) takes values from forks that it does not train on."""
    credit = _Credit(table, params.discount)
    turns, others = credit.turns, credit.of_others()
    count = group_sum(torch.ones_like(others), turns.context) - 1
    total = group_sum(credit.to_go, turns.context) - credit.to_go
    prior, level = others.tolist(), others.nan_to_num(0.0).tolist()  # without other episodes, all are on one level
    counts, totals, found = count.tolist(), total.tolist(), list[float]()
    for number, parent in enumerate(turns.parent.tolist()):
        known = level[number] + found[parent] - level[parent] if parent >= 0 else prior[number]
        if math.isnan(known):
            found.append(totals[number] / counts[number] if counts[number] else math.nan)
        else:
            found.append((totals[number] + known) / (counts[number] + 1))
    return credit.advantages(torch.tensor(found, dtype=torch.float64))


def gigpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(R - mean) / std of the episode, plus `step_weight` times the same of the discounted returns of all turns of the
    group in one state: GiGPO, arXiv 2505.10978, equations 3 to 8. A turn alone in its state has only the first.

    verl-agent's gigpo/core_gigpo.py with mean_std_norm, but that a single episode has no advantage, and that the
    episode's mean is over episodes, as in the paper, not over all their turns."""
    return _gigpo(table, params, scale=True)


def dr_gigpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """The same without the division: the paper's F_norm = 1, verl-agent's mean_norm."""
    return _gigpo(table, params, scale=False)


def _gigpo(table: TokenTable, params: AdvantageParams, *, scale: bool) -> Tensor:
    groups, turns = Groups(table), turns_of(table)
    episode = groups.rewards - groups.mean()
    episode = groups.spread(episode / (groups.deviation() + EPSILON) if scale else episode)
    to_go = turns.to_go(turn_rewards(table, turns), params.discount)
    step = standardised(to_go, turns.state) if scale else centred(to_go, turns.state)
    return episode + params.step_weight * (turns.share * step)[turns.of_token]


class _Credit:
    """Turns with their returns, and what other episodes of the group returned."""

    def __init__(self, table: TokenTable, discount: float) -> None:
        self.turns = turns = turns_of(table)
        self.group = table.group[turns.owner]
        self.to_go = turns.to_go(turn_rewards(table, turns), discount)
        self._table = table

    def of_others(self) -> Tensor:
        """[M] mean return of other episodes of the group, from turns of the same number on; of whole ones, where none
        came so far; NaN where there are no others."""
        turns, depth = self.turns, self.turns.depth()
        span = int(depth.max()) + 1 if len(depth) else 1
        same, own = self.group * span + depth, turns.owner * span + depth
        weighed, ones = turns.share * self.to_go, torch.ones_like(self.to_go)
        share = group_sum(turns.share, same) - group_sum(turns.share, own)
        found = (group_sum(weighed, same) - group_sum(weighed, own)) / share
        return torch.where(group_sum(ones, same) > group_sum(ones, own), found, self._whole())

    def _whole(self) -> Tensor:
        """[M] mean return of whole other episodes."""
        turns, group = self.turns, self._table.group
        begins = turns.parent < 0
        whole = self.to_go.new_zeros(len(group))
        whole = whole.index_add(0, turns.owner[begins], (turns.part * self.to_go)[begins])
        played = torch.zeros_like(whole).index_fill(0, turns.owner, 1.0)
        others = group_sum(played, group) - 1.0
        return torch.where(others > 0, (group_sum(whole, group) - whole) / others, torch.nan)[turns.owner]

    def advantages(self, baseline: Tensor) -> Tensor:
        """[M] -> [N]; none where there is no baseline, and exactly none where returns differ by rounding alone."""
        found = self.to_go - baseline
        size = self.to_go.new_zeros(int(self.group.max()) + 1 if len(self.group) else 0)
        size = size.scatter_reduce(0, self.group, self.to_go.abs(), "amax")[self.group]
        found = torch.where((found.abs() > ROUNDING * size) & ~found.isnan(), found, 0.0)
        return (self.turns.share * found)[self.turns.of_token]
