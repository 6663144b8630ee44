"""The turns of an episode: the context of each (its parent turn of the same role, its share, and the tokens before it),
and of a table the sums along the branches.

    P | a o b o c        the trunk, turns 0 1 2             parent -1 0 1    share 1 1/2 1/2
    P a o | d o e        turns 3 4, turn 3 forks after 0    parent  0 3      share 1/2 1/2

Turns 1 and 3 were written in the same context: P a o. Equal contexts are found by a hash of their token ids, so that
the division of an episode into samples does not matter.

If an episode forks, a turn has several successors. What comes after it is their mean, each weighted by its part. The
return of a turn is then an unbiased estimate of what it led to, from as many continuations as there are, and the
rewards of an episode, each weighted by its share, sum to the mean over its branches. An episode's own reward (which all
of its turns share) is added where a branch ends.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from asyncrl.schema import Trajectory


@dataclass(frozen=True)
class TurnContext:
    """The context of one turn."""

    after: int  # the previous turn of its role on its branch, -1: none
    parent: int  # the same, skipping turns that wrote nothing: no token belongs to these
    share: float  # 1, or its fraction of the episode if that has several branches
    context: tuple[bytes, int]  # hash of the token ids before it, and how often its branch has had this context before
    state: str | bytes  # named by the environment, or the hash of the context


def turn_contexts(trajectory: Trajectory, prompt_ids: list[int]) -> list[TurnContext]:
    """Return the context of every turn, in order."""
    turns, parents, shares = trajectory.turns, trajectory.parents(), trajectory.shares()
    contexts, found = _contexts(trajectory, prompt_ids), list[TurnContext]()
    met: set[tuple[str, bytes]] = set()
    for place, turn in enumerate(turns):
        after = parents[place]
        while after >= 0 and turns[after].role != turn.role:
            after = parents[after]
        parent = after if after < 0 or turns[after].completion.token_ids else found[after].parent
        context = contexts[place]
        again = _times(context, after, contexts, found) if (turn.role, context) in met else 0
        met.add((turn.role, context))
        found.append(TurnContext(after, parent, shares[place], (context, again), turn.state or context))
    return found


def _times(context: bytes, place: int, contexts: list[bytes], found: list[TurnContext]) -> int:
    """Count how often a context occurs on the path from the turn `place` upwards."""
    times = 0
    while place >= 0:
        times += contexts[place] == context
        place = found[place].after
    return times


def _contexts(trajectory: Trajectory, prompt_ids: list[int]) -> list[bytes]:
    found = [b""] * len(trajectory.turns)
    for sample in trajectory.samples():
        context = blake2b(b"" if sample[0][1].begins else _bytes(prompt_ids), digest_size=16)
        for place, turn in sample:
            context.update(_bytes(turn.observation))
            found[place] = context.digest()
            context.update(_bytes(turn.completion.token_ids))
    return found


def _bytes(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


# -- sums along branches ----------------------------------------------------------------------------------------


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
