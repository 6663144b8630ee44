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

from asyncrl.algo.credit import dr_gigpo, gigpo, turn_discounted, turn_loo
from asyncrl.algo.siblings import EPSILON, Groups, standardised
from asyncrl.algo.table import TokenTable, known
from asyncrl.algo.turns import steps_of, token_rewards, turn_rewards, turns_of
from asyncrl.errors import ConfigError

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageParams:
    """The numbers that estimators take."""

    discount: float = 1.0  # gamma, per token in gae and reinforce_pp, else per turn
    gae_lambda: float = 1.0
    pass_k: int = 1
    correct_above: float = 0.0  # a sample counts as correct when its reward is above this
    step_weight: float = 1.0  # of gigpo's step-level advantage


Advantage = Callable[[TokenTable, AdvantageParams], Tensor]
"""[N] float64."""


def none(table: TokenTable, params: AdvantageParams) -> Tensor:
    """0: rewards count for nothing, and what else there is (a teacher: algo/distill.py) trains alone."""
    return torch.zeros_like(table.behaviour)


# -- whole episodes against their siblings ---------------------------------------------------------------------


def grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(R - mean) / (std + EPSILON): GRPO, arXiv 2402.03300, section 4.1.2."""
    groups = Groups(table)
    return groups.spread((groups.rewards - groups.mean()) / (groups.deviation() + EPSILON))


def dr_grpo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783, which drops the division for its bias towards easy and hard prompts."""
    groups = Groups(table)
    return groups.spread(groups.rewards - groups.mean())


def rloo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R minus the mean of the others, n/(n-1) (R - mean): RLOO, arXiv 2402.14740."""
    groups = Groups(table)
    others = (groups.sizes - 1).clamp(min=1)
    return groups.spread((groups.rewards - groups.mean()) * groups.sizes / others)


def opo(table: TokenTable, params: AdvantageParams) -> Tensor:
    """R minus the length-weighted mean of the group: OPO, arXiv 2505.23585, the baseline of least variance."""
    groups = Groups(table)
    lengths = table.sum_per_episode(torch.ones_like(table.behaviour))
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return groups.spread(groups.rewards - baseline)


def maxrl(table: TokenTable, params: AdvantageParams) -> Tensor:
    """(R - mean) / mean: MaxRL, arXiv 2602.02710, towards the likelihood of success. Rewards must not be negative."""
    groups = Groups(table)
    if bool((groups.rewards < 0).any()):
        lowest = float(groups.rewards.min())
        raise ConfigError("algo.advantage", "maxrl", f"It needs rewards of 0 or more, and one is {lowest:g}.")
    mean = groups.mean()
    return groups.spread((groups.rewards - mean) / torch.where(mean > 0, mean, 1.0))


def pass_at_k(table: TokenTable, params: AdvantageParams) -> Tensor:
    """The advantage of a sample in a random k of its group, in closed form: pass@k training, arXiv 2508.10751, section
    2.3. With w wrong answers of n, and p = 1 - C(w, k) / C(n, k):
    (1 - p) / s for right ones, (1 - p - C(w-1, k-1) / C(n-1, k-1)) / s for wrong ones, s = sqrt(p (1 - p))."""
    groups = Groups(table)
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
    groups = Groups(table)
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
    turns = turns_of(table)
    normal = standardised(turn_rewards(table, turns), table.group[turns.owner])
    return table.share * turns.to_go(normal, params.discount)[turns.of_token]


def reinforce_pp(table: TokenTable, params: AdvantageParams) -> Tensor:
    """The discounted rewards from each token on, whitened over the tokens of the batch: REINFORCE++, 2501.03262."""
    turns = turns_of(table)
    return whiten(table.share * steps_of(turns).to_go(token_rewards(table, turns), params.discount))


def gae(table: TokenTable, params: AdvantageParams) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the batch as PPO's implementations do."""
    return whiten(table.share * gae_raw(table, params))


def gae_raw(table: TokenTable, params: AdvantageParams) -> Tensor:
    """d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1); V is 0 after the last token. What the critic
    learns is this plus V."""
    values, turns = known(table.values), turns_of(table)
    steps = steps_of(turns)
    delta = token_rewards(table, turns) + params.discount * steps.after(values) - values
    return steps.to_go(delta, params.discount * params.gae_lambda)


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
    "turn_discounted": turn_discounted,
    "turn_loo": turn_loo,
    "gigpo": gigpo,
    "dr_gigpo": dr_gigpo,
}
