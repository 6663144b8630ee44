"""Advantages: from the rewards of a batch to one number per trained token. Adding one is one function and one row.

Siblings are found by their group's number. Standard deviations are unbiased (ddof 1) and EPSILON is added to them, as
slime and verl do; over a batch, whitening divides by sqrt(variance + WHITEN_EPSILON), as verl's masked_whiten does. A
group whose rewards are all equal, or that has a single member, carries no signal: group-relative advantages are zero.
Estimators that whiten over the batch take the mean over tokens off every token, also in such a group.
Tokens that the policy did not write (observations) are not in the table, so every recursion over tokens skips them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable, known
from asyncrl.errors import ConfigError

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageParams:
    """The numbers that estimators take."""

    discount: float = 1.0  # gamma, per token (per turn in grpo_turn)
    gae_lambda: float = 1.0
    pass_k: int = 1
    correct_above: float = 0.0  # a sample counts as correct when its reward is above this


Advantage = Callable[[TokenTable, AdvantageParams], Tensor]
"""[N] float64."""


def none(table: TokenTable, params: AdvantageParams) -> Tensor:
    """0: rewards count for nothing, and what else there is (a teacher: algo/distill.py) trains alone."""
    return torch.zeros_like(table.behaviour)


# -- whole episodes against their siblings ---------------------------------------------------------------------


def grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(R - mean) / (std + EPSILON): GRPO, arXiv 2402.03300, section 4.1.2."""
    groups = _Groups(table)
    return groups.spread((groups.rewards - groups.mean()) / (groups.deviation() + EPSILON))


def dr_grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783, which drops the division for its bias towards easy and hard prompts."""
    groups = _Groups(table)
    return groups.spread(groups.rewards - groups.mean())


def rloo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R minus the mean of the others, n/(n-1) (R - mean): RLOO, arXiv 2402.14740."""
    groups = _Groups(table)
    others = (groups.sizes - 1).clamp(min=1)
    return groups.spread((groups.rewards - groups.mean()) * groups.sizes / others)


def opo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R minus the length-weighted mean of the group: OPO, arXiv 2505.23585, the baseline of least variance."""
    groups = _Groups(table)
    lengths = table.sum_per_episode(torch.ones_like(table.behaviour))
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return groups.spread(groups.rewards - baseline)


def maxrl(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(R - mean) / mean: MaxRL, arXiv 2602.02710, towards the likelihood of success. Rewards must not be negative."""
    groups = _Groups(table)
    if bool((groups.rewards < 0).any()):
        lowest = float(groups.rewards.min())
        raise ConfigError("algo.advantage", "maxrl", f"It needs rewards of 0 or more, and one is {lowest:g}.")
    mean = groups.mean()
    return groups.spread((groups.rewards - mean) / torch.where(mean > 0, mean, 1.0))


def pass_at_k(table: TokenTable, params: AdvantageParams) -> Tensor:
    """The advantage of a sample in a random k of its group, in closed form: pass@k training, arXiv 2508.10751, section
    2.3. With w wrong answers of n, and p = 1 - C(w, k) / C(n, k):
    (1 - p) / s for right ones, (1 - p - C(w-1, k-1) / C(n-1, k-1)) / s for wrong ones, s = sqrt(p (1 - p))."""
    groups = _Groups(table)
    correct = groups.rewards > params.correct_above
    wrong = groups.total((~correct).to(groups.rewards.dtype))
    found = torch.zeros_like(groups.rewards)
    for n, w in {(int(n), int(w)) for n, w in zip(groups.sizes, wrong, strict=True)}:
        k = min(params.pass_k, n)
        mean = 1 - comb(w, k) / comb(n, k)
        if not 0 < mean < 1:
            continue  # every k of them, or none, has a right answer: no sample makes a difference
        deviation = (mean * (1 - mean)) ** 0.5
        these = (groups.sizes == n) & (wrong == w)
        found[these & correct] = (1 - mean) / deviation
        found[these & ~correct] = (1 - mean - comb(w - 1, k - 1) / comb(n - 1, k - 1)) / deviation
    return table.per_token(found)


def grpo_passk(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(best - second) / (std + EPSILON) for the best sample, zero for the others: pass@n (arXiv 2503.19595), in verl's
    form of that name. Where two share the best reward, none of them makes a difference."""
    groups = _Groups(table)
    found = torch.zeros_like(groups.rewards)
    for group in range(table.num_groups):
        members = (table.group == group).nonzero()[:, 0]
        if len(members) > 1:
            ordered = groups.rewards[members].sort(descending=True)
            found[members[ordered.indices[0]]] = ordered.values[0] - ordered.values[1]
    return groups.spread(found / (groups.deviation() + EPSILON))


def reinforce_pp_baseline(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R - mean of the group, then whitened over all tokens of the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(dr_grpo(table, params))


# -- turns and tokens ------------------------------------------------------------------------------------------


def grpo_turn(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Process supervision: the turn's reward and those of later turns, each normalised among all turns of the group
    (GRPO, arXiv 2402.03300, section 4.1.3); the reward of the episode counts with its last turn."""
    turns = _turns(table)
    owner = table.owner[turns.last]
    normal = _normalised(turns.rewards, table.group[owner])
    to_go = returns(normal, owner, params.discount)
    return to_go[turns.of_token]


def reinforce_pp(table: TokenTable, params: AdvantageParams) -> Tensor:
    """The discounted rewards from each token on, whitened over the tokens of the batch: REINFORCE++, 2501.03262."""
    return whiten(returns(token_rewards(table), table.owner, params.discount))


def gae(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the batch as PPO's implementations do."""
    return whiten(gae_raw(table, params))


def gae_raw(table: TokenTable, params: AdvantageParams) -> Tensor:
    """d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1); V is 0 after the last token. What the critic
    learns is this plus V."""
    values = known(table.values)
    after = torch.cat([values[1:], values.new_zeros(1)])
    after[table.last_rows()] = 0.0
    delta = token_rewards(table) + params.discount * after - values
    return returns(delta, table.owner, params.discount * params.gae_lambda)


def token_rewards(table: TokenTable) -> Tensor:
    """[N] with the reward of the episode at its last token."""
    rewards, last = table.token_reward.clone(), table.last_rows()
    rewards[last] += table.reward[table.owner[last]]
    return rewards


def whiten(values: Tensor) -> Tensor:
    """Zero mean and unit variance over all tokens of the batch; a long sample weighs more than a short one."""
    if len(values) < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / torch.sqrt(values.var() + WHITEN_EPSILON)


ADVANTAGES: dict[str, Advantage] = {
    "none": none,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "grpo_passk": grpo_passk,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo_turn": grpo_turn,
    "gae": gae,
}


# -- sums over groups, turns and tokens ------------------------------------------------------------------------


class _Groups:
    """Rewards of episodes, with the figures of each one's group beside it: everything [E]."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.rewards = table.reward + table.sum_per_episode(table.token_reward)
        self.sizes = self.total(torch.ones_like(self.rewards))

    def total(self, values: Tensor) -> Tensor:
        """Sum over the group."""
        return _group_sum(values, self._table.group)

    def mean(self) -> Tensor:
        """Mean reward of the group."""
        return self.total(self.rewards) / self.sizes

    def deviation(self) -> Tensor:
        """Its unbiased standard deviation; 0 where there is one sample."""
        squares = self.total((self.rewards - self.mean()) ** 2)
        return torch.sqrt(squares / (self.sizes - 1).clamp(min=1))

    def spread(self, advantages: Tensor) -> Tensor:
        """[E] -> [N], zero in groups whose rewards are all equal (their mean may differ from them by rounding)."""
        return self._table.per_token(torch.where(_differs(self.rewards, self._table.group), advantages, 0.0))


@dataclass(frozen=True)
class _Turns:
    last: Tensor  # [M] row of the last token of each turn
    of_token: Tensor  # [N] number of each token's turn, 0..M-1
    rewards: Tensor  # [M]


def _turns(table: TokenTable) -> _Turns:
    starts = torch.ones(table.num_tokens, dtype=torch.bool)
    starts[1:] = (table.owner[1:] != table.owner[:-1]) | (table.turn[1:] != table.turn[:-1])
    of_token = starts.cumsum(0) - 1
    count = int(starts.sum())
    rewards = torch.zeros(count, dtype=torch.float64).index_add(0, of_token, token_rewards(table))
    return _Turns(torch.bincount(of_token, minlength=count).cumsum(0) - 1, of_token, rewards)


def returns(rewards: Tensor, owner: Tensor, decay: float) -> Tensor:
    """G_i = r_i + decay * G_(i+1) within each owner, whose entries stand together. [n] -> [n]."""
    found = rewards.tolist()
    owners = owner.tolist()
    for i in range(len(found) - 2, -1, -1):
        if owners[i] == owners[i + 1]:
            found[i] += decay * found[i + 1]
    return torch.tensor(found, dtype=rewards.dtype, device=rewards.device)


def _normalised(values: Tensor, group: Tensor) -> Tensor:
    """(v - mean) / (std + EPSILON) within each group; zero where all are equal."""
    count = _group_sum(torch.ones_like(values), group)
    centred = values - _group_sum(values, group) / count
    deviation = torch.sqrt(_group_sum(centred**2, group) / (count - 1).clamp(min=1))
    return torch.where(_differs(values, group), centred / (deviation + EPSILON), 0.0)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    sums = values.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, values)
    return sums[group]


def _differs(values: Tensor, group: Tensor) -> Tensor:
    """Whether the group of each value holds two that differ."""
    size = int(group.max()) + 1 if len(group) else 0
    lowest = values.new_full((size,), torch.inf).scatter_reduce(0, group, values, "amin")
    highest = values.new_full((size,), -torch.inf).scatter_reduce(0, group, values, "amax")
    return (lowest < highest)[group]
