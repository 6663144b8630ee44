"""The mean of an unbiased estimator is the policy gradient.

The tests compute the mean exactly, over all groups that a small world can give. scripts/bench_credit.py measures the
noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncrl.algo.advantage import ADVANTAGES, group_sum
from asyncrl.algo.branches import TurnTable
from asyncrl.algo.table import TokenTable
from asyncrl.extensions.turns.advantage import depths
from tests.algo.decisions import Groups, groups, world
from tests.algo.tables import advantage

CASES: dict[str, Callable[[], Groups]] = {
    "three episodes": lambda: groups(3),
    "a fork behind the first turn": lambda: groups(2, ((1, 1),)),
    "a fork at the start": lambda: groups(2, ((0, 1),)),
    "forks within forks": lambda: groups(2, ((1, 1), (2, 1))),
    "contexts that come again": lambda: groups(3, forgets=True),
    "and fork": lambda: groups(2, ((1, 1),), forgets=True),
}


def exact(case: str, discount: float = 1.0) -> Tensor:
    return world(forgets=case in ("contexts that come again", "and fork")).policy_gradient(discount)


def bias(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["rloo", "turn_discounted", "turn_loo"])
def test_mean_of_the_estimate_is_the_policy_gradient(name: str, case: str) -> None:
    of = CASES[case]()
    assert float(of.chances.sum()) == pytest.approx(1.0)
    assert bias(of.mean(advantage(name)(of.table)), exact(case)) < 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["turn_discounted", "turn_loo"])
def test_mean_with_a_discount_is_that_of_discounted_returns(name: str, case: str) -> None:
    of = CASES[case]()
    found = of.mean(advantage(name, discount=0.5)(of.table))
    assert bias(found, exact(case, 0.5)) < 1e-12
    assert bias(found, exact(case)) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_centring_takes_only_its_part_of_the_gradient(case: str) -> None:
    of = CASES[case]()
    found = of.mean(advantage("dr_grpo")(of.table))
    assert bias(found * of.size / (of.size - 1), exact(case)) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_gae_of_whole_returns_is_unbiased_for_any_critic(case: str) -> None:
    gae_raw = pytest.importorskip("asyncrl.extensions.critic.value").gae_raw
    of = CASES[case]()
    context = of.scores.abs().sum(2).argmax(1)
    table = replace(of.table, values=torch.sin(context.double()))
    assert bias(of.mean(table.share * gae_raw(table, discount=1.0, gae_lambda=1.0)), exact(case)) < 1e-12


def test_omitted_part_of_a_fork_overtrains_what_follows() -> None:
    of = groups(2, ((1, 1),))
    whole = replace(of.table, share=torch.ones_like(of.table.share))
    assert bias(of.mean(advantage("turn_loo")(whole)), world().policy_gradient()) > 1e-2


# -- what is not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ("grpo", "grpo_turn", "opo") if name in ADVANTAGES])
def test_estimators_that_are_known_to_be_biased_are(name: str) -> None:
    of = groups(3, forgets=True)
    found, expected = of.mean(advantage(name)(of.table)), exact("contexts that come again")
    scale = float((found * expected).sum() / (found**2).sum())  # no multiple of it either
    assert bias(scale * found, expected) > 2e-3


def others(values: Tensor, turns: TurnTable, table: TokenTable, *, itself: bool = False) -> tuple[Tensor, Tensor]:
    """Mean over turns of the same number in the group's other episodes, or in all, and of how many. No forks."""
    same = table.group[turns.owner] * 10 + depths(turns)
    count = group_sum(torch.ones_like(values), same) - (0 if itself else 1)
    return (group_sum(values, same) - (0 if itself else values)) / count.clamp(min=1), count


def test_means_by_turn_added_over_turns_are_biased() -> None:
    """This is the kind of MT-GRPO. The bias remains if each mean leaves out the own reward and nothing is divided (verl
    #7244)."""
    of = groups(3)
    turns = of.table.turns
    rewards = turns.turn_rewards()
    mean, _ = others(rewards, turns, of.table)
    added_up = turns.to_go(rewards - mean, 1.0)
    assert bias(of.mean(added_up), world().policy_gradient()) > 1e-2
    to_go = turns.to_go(rewards, 1.0)
    at_once, _ = others(to_go, turns, of.table)  # one mean, of what comes from there on
    assert bias(of.mean(to_go - at_once), world().policy_gradient()) < 1e-12


def test_mean_with_the_own_return_is_biased_over_more_turns() -> None:
    of = groups(3)
    turns = of.table.turns
    to_go = turns.to_go(turns.turn_rewards(), 1.0)
    mean, _ = others(to_go, turns, of.table, itself=True)
    found, expected = of.mean(to_go - mean), world().policy_gradient()
    assert bias(found * 3 / 2, expected) > 1e-2


def test_turns_without_a_sibling_cannot_be_left_out() -> None:
    of = groups(3)
    turns = of.table.turns
    to_go = turns.to_go(turns.turn_rewards(), 1.0)
    mean, count = others(to_go, turns, of.table)
    assert bias(of.mean(torch.where(count > 0, to_go - mean, 0.0)), world().policy_gradient()) > 1e-2


def test_return_of_a_later_visit_is_no_baseline() -> None:
    of, once = groups(3, forgets=True), groups(3)
    for made, case, biased in ((of, "contexts that come again", True), (once, "three episodes", False)):
        table = replace(made.table, context=made.table.state)  # which does not count visits
        assert (bias(made.mean(advantage("turn_loo")(table)), exact(case)) > 1e-3) == biased


def test_where_to_fork_must_not_be_decided_by_what_came_after() -> None:
    of = groups(2, ((1, 1),), failed=True)
    assert float(of.chances.sum()) == pytest.approx(1.0)
    assert bias(of.mean(advantage("turn_loo")(of.table)), world().policy_gradient()) > 1e-2


# -- noise ---------------------------------------------------------------------------------------------------------


def test_turns_are_less_noisy_than_whole_episodes_here() -> None:
    def noise(of: Groups, name: str) -> float:
        return of.variance(advantage(name)(of.table))

    plain, forked = groups(3), groups(2, ((1, 1),))
    assert noise(plain, "turn_discounted") < 0.95 * noise(plain, "rloo")
    assert noise(forked, "turn_loo") < 0.6 * noise(forked, "rloo")
    assert noise(groups(2, ((0, 1),)), "turn_loo") < 0.92 * noise(groups(2, ((0, 1),)), "turn_discounted")
