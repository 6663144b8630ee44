"""Advantage estimators: from the rewards of a batch to one number per trained token. A new estimator is one function
and one row of ADVANTAGES.

Siblings are the episodes of one group, found by its number. Standard deviations are unbiased (ddof 1) and EPSILON is
added to them, as in slime and verl. Whitening over a batch divides by sqrt(variance + WHITEN_EPSILON), like verl's
masked_whiten. A group whose rewards are all equal, or that has a single member, carries no signal: its group-relative
advantages are zero. Estimators that whiten over the batch subtract the mean over tokens from every token, also in such
a group. Tokens that the policy did not write (observations) are not in the table, so every recursion over tokens skips
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from asyncrl.algo.credit import dr_gigpo, gigpo, turn_discounted, turn_loo
from asyncrl.algo.siblings import EPSILON, GroupStatistics, standardised
from asyncrl.algo.table import TokenTable, known
from asyncrl.algo.turns import steps_of, token_rewards, turn_rewards, turns_of
from asyncrl.errors import ConfigError

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageParams:
    """Parameters of the estimators."""

    discount: float = 1.0  # gamma, per token in gae and reinforce_pp, else per turn
    gae_lambda: float = 1.0
    pass_k: int = 1
    correct_above: float = 0.0  # a sample counts as correct if its reward is above this
    step_weight: float = 1.0  # weight of gigpo's step-level advantage


Advantage = Callable[[TokenTable, AdvantageParams], Tensor]
"""Maps the table to advantages, [N] float64."""


def none(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return 0 for every token: rewards have no effect, and only another signal trains (such as a teacher:
    algo/distill.py)."""
    return torch.zeros_like(table.behaviour)


# -- whole episodes compared with their siblings ---------------------------------------------------------------


def grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return (R - mean) / (std + EPSILON): GRPO, arXiv 2402.03300, section 4.1.2."""
    groups = GroupStatistics(table)
    return groups.spread((groups.rewards - groups.mean()) / (groups.deviation() + EPSILON))


def dr_grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return R - mean: Dr. GRPO, arXiv 2503.20783, which omits the division because it biases towards easy and hard
    prompts."""
    groups = GroupStatistics(table)
    return groups.spread(groups.rewards - groups.mean())


def rloo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return R minus the mean of the others, n/(n-1) (R - mean): RLOO, arXiv 2402.14740."""
    groups = GroupStatistics(table)
    others = (groups.sizes - 1).clamp(min=1)
    return groups.spread((groups.rewards - groups.mean()) * groups.sizes / others)


def opo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return R minus the length-weighted mean of the group: OPO, arXiv 2505.23585, the minimum-variance baseline."""
    groups = GroupStatistics(table)
    lengths = table.sum_per_episode(torch.ones_like(table.behaviour))
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return groups.spread(groups.rewards - baseline)


def maxrl(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return (R - mean) / mean: MaxRL, arXiv 2602.02710, which approximates maximum likelihood of success. Raises
    ConfigError for negative rewards."""
    groups = GroupStatistics(table)
    if bool((groups.rewards < 0).any()):
        lowest = float(groups.rewards.min())
        raise ConfigError("algo.advantage", "maxrl", f"It needs rewards of 0 or more; one is {lowest:g}.")
    mean = groups.mean()
    return groups.spread((groups.rewards - mean) / torch.where(mean > 0, mean, 1.0))


def pass_at_k(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return the advantage of a sample in a random subset of k of its group, in closed form: pass@k training, arXiv
    2508.10751, section 2.3. With w wrong answers of n, p = 1 - C(w, k) / C(n, k) and s = sqrt(p (1 - p)), it is (1 - p)
    / s for correct answers and (1 - p - C(w-1, k-1) / C(n-1, k-1)) / s for wrong ones."""
    groups = GroupStatistics(table)
    correct = groups.rewards > params.correct_above
    wrong = groups.total((~correct).to(groups.rewards.dtype))
    found = torch.zeros_like(groups.rewards)
    for n, w in {(int(n), int(w)) for n, w in zip(groups.sizes, wrong, strict=True)}:
        k = min(params.pass_k, n)
        mean = 1 - comb(w, k) / comb(n, k)
        if not 0 < mean < 1:
            continue  # every subset of k has a correct answer, or none has: no sample changes the outcome
        deviation = (mean * (1 - mean)) ** 0.5
        these = (groups.sizes == n) & (wrong == w)
        found[these & correct] = (1 - mean) / deviation
        found[these & ~correct] = (1 - mean - comb(w - 1, k - 1) / comb(n - 1, k - 1)) / deviation
    return table.per_token(found)


def grpo_passk(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return (best - second) / (std + EPSILON) for the best sample and zero for the others: pass@n (arXiv 2503.19595),
    in verl's grpo_passk form. If two share the best reward, all advantages are zero."""
    groups = GroupStatistics(table)
    found = torch.zeros_like(groups.rewards)
    for group in range(table.num_groups):
        members = (table.group == group).nonzero()[:, 0]
        if len(members) > 1:
            ordered = groups.rewards[members].sort(descending=True)
            found[members[ordered.indices[0]]] = ordered.values[0] - ordered.values[1]
    return groups.spread(found / (groups.deviation() + EPSILON))


def reinforce_pp_baseline(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return R - mean of the group, whitened over all tokens of the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(dr_grpo(table, params))


# -- turns and tokens ------------------------------------------------------------------------------------------


def grpo_turn(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return process-supervised advantages: the sum of the rewards of the turn and of later turns, each normalized over
    all turns of the group (GRPO, arXiv 2402.03300, section 4.1.3). The reward of the episode belongs to its last
    turn."""
    turns = turns_of(table)
    normal = standardised(turn_rewards(table, turns), table.group[turns.owner])
    return table.share * turns.to_go(normal, params.discount)[turns.of_token]


def reinforce_pp(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return the discounted reward-to-go of each token, whitened over the tokens of the batch: REINFORCE++, arXiv
    2501.03262."""
    turns = turns_of(table)
    return whiten(table.share * steps_of(turns).to_go(token_rewards(table, turns), params.discount))


def gae(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438), whitened over the batch as PPO implementations do."""
    return whiten(table.share * gae_raw(table, params))


def gae_raw(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Return GAE before whitening: d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1); V is 0 after the
    last token. The critic's target is this plus V."""
    values, turns = known(table.values), turns_of(table)
    steps = steps_of(turns)
    delta = token_rewards(table, turns) + params.discount * steps.after(values) - values
    return steps.to_go(delta, params.discount * params.gae_lambda)


def whiten(values: Tensor) -> Tensor:
    """Normalize to zero mean and unit variance over all tokens of the batch, so that a long sample weighs more than a
    short one."""
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
    "turn_discounted": turn_discounted,
    "turn_loo": turn_loo,
    "gigpo": gigpo,
    "dr_gigpo": dr_gigpo,
}
