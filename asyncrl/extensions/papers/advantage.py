"""Advantage estimators that compare the whole episodes of a group in other ways than by their mean and deviation."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

from asyncrl.algo.advantage import ADVANTAGES, EPSILON, AdvantageTraits
from asyncrl.errors import ConfigError
from asyncrl.settings import Count

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TokenTable


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
