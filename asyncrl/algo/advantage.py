"""Advantage estimators: from the rewards of a batch to one number per trained token. A new estimator is one function.

Siblings are the episodes of one group, found by its number. Standard deviations are unbiased (ddof 1) and EPSILON is
added to them, as in slime and verl. Whitening over a batch divides by sqrt(variance + WHITEN_EPSILON), like verl's
masked_whiten. A group whose rewards are all equal, or that has a single member, carries no signal: its group-relative
advantages are zero. Estimators that whiten over the batch subtract the mean over tokens from every token, also in such
a group. Tokens that the policy did not write (observations) are not in the table, so every recursion over tokens skips
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import comb
from typing import TYPE_CHECKING

from asyncrl import lookup
from asyncrl.algo.registry import AlgorithmRegistry
from asyncrl.algo.siblings import EPSILON, standardised
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TokenTable

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


@ADVANTAGES.register()
def opo(table: TokenTable) -> Tensor:
    """Return R minus the length-weighted mean of the group: OPO, arXiv 2505.23585, the minimum-variance baseline."""
    groups = table.groups
    lengths = table.sum_per_episode(table.behaviour.new_ones(table.num_tokens))
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return groups.spread(groups.rewards - baseline)


@ADVANTAGES.register(AdvantageTraits(unshaped=True))
def maxrl(table: TokenTable) -> Tensor:
    """Return (R - mean) / mean: MaxRL, arXiv 2602.02710, which approximates maximum likelihood of success. Raises
    ConfigError for negative rewards."""
    groups = table.groups
    if bool((groups.rewards < 0).any()):
        lowest = float(groups.rewards.min())
        raise ConfigError("algo.advantage", "maxrl", f"It needs rewards of 0 or more; one is {lowest:g}.")
    mean = groups.mean()
    return groups.spread((groups.rewards - mean) / mean.where(mean > 0, 1.0))


@ADVANTAGES.register(AdvantageTraits(unshaped=True))
def pass_at_k(table: TokenTable, *, k: Count = 4, correct_above: float = 0.0) -> Tensor:
    """Return the advantage of a sample in a random subset of k of its group, in closed form: pass@k training, arXiv
    2508.10751, section 2.3. With w wrong answers of n, p = 1 - C(w, k) / C(n, k) and s = sqrt(p (1 - p)), it is (1 - p)
    / s for correct answers and (1 - p - C(w-1, k-1) / C(n-1, k-1)) / s for wrong ones."""
    groups = table.groups
    correct = groups.rewards > correct_above
    wrong = groups.total((~correct).to(groups.rewards.dtype))
    found = groups.rewards.new_zeros(len(groups.rewards))
    for n, w in {(int(n), int(w)) for n, w in zip(groups.sizes, wrong, strict=True)}:
        size = min(k, n)
        mean = 1 - comb(w, size) / comb(n, size)
        if not 0 < mean < 1:
            continue  # every subset of k has a correct answer, or none has: no sample changes the outcome
        deviation = (mean * (1 - mean)) ** 0.5
        these = (groups.sizes == n) & (wrong == w)
        found[these & correct] = (1 - mean) / deviation
        found[these & ~correct] = (1 - mean - comb(w - 1, size - 1) / comb(n - 1, size - 1)) / deviation
    return table.per_token(found)


@ADVANTAGES.register()
def grpo_passk(table: TokenTable) -> Tensor:
    """Return (best - second) / (std + EPSILON) for the best sample and zero for the others: pass@n (arXiv 2503.19595),
    in verl's grpo_passk form. If two share the best reward, all advantages are zero."""
    groups = table.groups
    found = groups.rewards.new_zeros(len(groups.rewards))
    for group in range(table.num_groups):
        members = (table.group == group).nonzero()[:, 0]
        if len(members) > 1:
            ordered = groups.rewards[members].sort(descending=True)
            found[members[ordered.indices[0]]] = ordered.values[0] - ordered.values[1]
    return groups.spread(found / (groups.deviation() + EPSILON))


@ADVANTAGES.register(AdvantageTraits(whole_batch=True))
def reinforce_pp_baseline(table: TokenTable) -> Tensor:
    """Return R - mean of the group, whitened over all tokens of the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(dr_grpo(table))


# -- turns and tokens ------------------------------------------------------------------------------------------


@ADVANTAGES.register()
def grpo_turn(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return process-supervised advantages: the sum of the rewards of the turn and of later turns, each normalized over
    all turns of the group (GRPO, arXiv 2402.03300, section 4.1.3). The reward of the episode belongs to its last
    turn."""
    turns = table.turns
    normal = standardised(turns.turn_rewards(), table.group[turns.owner])
    return table.share * turns.to_go(normal, discount)[turns.of_token]


@ADVANTAGES.register(AdvantageTraits(alone=True, whole_batch=True))
def reinforce_pp(table: TokenTable, *, discount: Share = 1.0) -> Tensor:
    """Return the discounted reward-to-go of each token, whitened over the tokens of the batch: REINFORCE++, arXiv
    2501.03262."""
    turns = table.turns
    return whiten(table.share * turns.tokens().to_go(turns.token_rewards(), discount))


@ADVANTAGES.register(AdvantageTraits(alone=True, whole_batch=True, critic=True))
def gae(table: TokenTable, *, discount: Share = 1.0, gae_lambda: Share = 1.0) -> Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438), whitened over the batch as PPO implementations do."""
    return whiten(table.share * gae_raw(table, discount=discount, gae_lambda=gae_lambda))


def gae_raw(table: TokenTable, *, discount: Share, gae_lambda: Share) -> Tensor:
    """Return GAE before whitening: d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1); V is 0 after the
    last token. The critic's target is this plus V."""
    values, tokens = table.column("values"), table.turns.tokens()
    delta = table.turns.token_rewards() + discount * tokens.after(values) - values
    return tokens.to_go(delta, discount * gae_lambda)


def whiten(values: Tensor) -> Tensor:
    """Normalize to zero mean and unit variance over all tokens of the batch, so that a long sample weighs more than a
    short one."""
    if len(values) < 2 or bool((values == values[0]).all()):
        return values.new_zeros(len(values))
    return (values - values.mean()) / (values.var() + WHITEN_EPSILON).sqrt()
