"""Sums over the turns and tokens of a table along the branches of its episodes, for algorithms that reward turns or
tokens by what came after them.

If an episode forks, a turn has several successors. What comes after it is their mean, each weighted by its part. The
return of a turn is then an unbiased estimate of what it led to, from as many continuations as there are, and the
rewards of an episode, each weighted by its share, sum to the mean over its branches. An episode's own reward (which all
of its turns share) is added where a branch ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from asyncrl.algo.table import TokenTable

ROUNDING = 1e-9
"""Less than this of a turn's continuations counts as none."""


@dataclass(frozen=True)
class TurnTable:
    """M turns that wrote something, in the order of the table, so that every turn comes after its parent."""

    first: Tensor  # [M] row of its first token
    last: Tensor  # [M] row of its last token
    of_token: Tensor  # [N] index of each token's turn, 0..M-1
    owner: Tensor  # [M] episode
    parent: Tensor  # [M] index of the parent turn, -1: none
    share: Tensor  # [M] fraction of the episode
    part: Tensor  # [M] fraction of what follows its parent, or of the episode's first turns
    ends: Tensor  # [M] fraction of its continuations that is empty: 1 at the end of a branch
    rewards: Tensor  # [M] rewards of the turn and its tokens, without the episode's
    outcome: Tensor  # [M] reward of its episode
    of_tokens: Tensor  # [N] rewards of single tokens, without the episode's
    context: Tensor  # [M] turns with equal numbers were written in one context
    state: Tensor  # [M] turns with equal numbers were in one state of the environment

    def turn_rewards(self) -> Tensor:
        """Return the rewards of the turns, plus that of the episode where its branches end, [M]."""
        return self.rewards + self.ends * self.outcome

    def token_rewards(self) -> Tensor:
        """Return the rewards of the tokens, plus that of the episode at the last token of each branch, [N]."""
        rewards = self.of_tokens.clone()
        rewards[self.last] += self.ends * self.outcome
        return rewards

    def tokens(self) -> TokenPredecessors:
        """Return the predecessors of the tokens."""
        parent = torch.arange(len(self.of_token)) - 1
        parent[self.first] = torch.where(self.parent >= 0, self.last[self.parent], -1) if len(self.last) else -1
        part = torch.ones(len(parent), dtype=torch.float64)
        part[self.first] = self.part
        return TokenPredecessors(parent, part)

    def to_go(self, rewards: Tensor, discount: float) -> Tensor:
        """Return the reward of each turn plus those after it, discounted per turn, [M]."""
        return accumulated(rewards, self.parent, discount, self.part)


@dataclass(frozen=True)
class TokenPredecessors:
    """Predecessor of each token on its branch."""

    parent: Tensor  # [N] row of the previous token, -1: none
    part: Tensor  # [N] its fraction of what follows that token

    def after(self, values: Tensor) -> Tensor:
        """Return the value at the token after each one, or the mean over several; 0 at the end of a branch. [N]."""
        follows = self.parent >= 0
        return sum_into((self.part * values)[follows], self.parent[follows], len(values))

    def to_go(self, values: Tensor, decay: float) -> Tensor:
        """Return the value of each token plus those after it, discounted per token, [N]."""
        return accumulated(values, self.parent, decay, self.part)


def turn_table(table: TokenTable) -> TurnTable:
    """Return the turns of a table."""
    starts = torch.ones(table.num_tokens, dtype=torch.bool)
    starts[1:] = (table.owner[1:] != table.owner[:-1]) | (table.turn[1:] != table.turn[:-1])
    first = starts.nonzero()[:, 0]
    last = torch.cat([first[1:], first.new_tensor([table.num_tokens])])[: len(first)] - 1
    of_token = starts.cumsum(0) - 1
    owner, share = table.owner[first], table.share[first]
    span = int(table.turn.max()) + 1 if table.num_tokens else 1
    found = torch.searchsorted(owner * span + table.turn[first], owner * span + table.parent[first])
    parent = torch.where(table.parent[first] >= 0, found, -1)
    after = parent >= 0
    part = torch.where(after, share / share[parent], share) if len(share) else share
    ends = (1.0 - sum_into(part[after], parent[after], len(first))).clamp(min=0.0)
    rewards = sum_into(table.token_reward, of_token, len(first))
    ends = torch.where(ends < ROUNDING, 0.0, ends)
    context, state = table.context[first], table.state[first]
    return TurnTable(
        first=first,
        last=last,
        of_token=of_token,
        owner=owner,
        parent=parent,
        share=share,
        part=part,
        ends=ends,
        rewards=rewards,
        outcome=table.reward[owner],
        of_tokens=table.token_reward,
        context=context,
        state=state,
    )


def accumulated(values: Tensor, parent: Tensor, decay: float, part: Tensor | None = None) -> Tensor:
    """Return G_i = v_i + decay * the sum of part_j G_j over those whose parent is i, [n] -> [n]. Every entry must come
    after its parent."""
    found, parents = values.tolist(), parent.tolist()
    parts = [1.0] * len(found) if part is None else part.tolist()
    for i in range(len(found) - 1, -1, -1):
        if parents[i] >= 0:
            found[parents[i]] += decay * parts[i] * found[i]
    return torch.tensor(found, dtype=values.dtype, device=values.device)


def sum_into(values: Tensor, where: Tensor, count: int) -> Tensor:
    """Sum values that belong to one of `count` places, [n] -> [count]."""
    return values.new_zeros(count).index_add(0, where, values)
