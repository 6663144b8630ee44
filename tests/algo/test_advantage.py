"""Advantages against numbers worked out by hand, and what must hold for every batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import ADVANTAGES, EPSILON, whiten
from asyncrl.algo.table import LossRows
from asyncrl.settings import Choice
from tests.algo.tables import (
    TWO,
    advantage,
    estimated,
    few,
    last_rows,
    make,
    numbers,
    quarters,
    reordered,
    tables,
    whitened,
    with_empty,
)

WHITENED = [name for name in ("reinforce_pp", "reinforce_pp_baseline", "gae") if name in ADVANTAGES]
RELATIVE = [name for name in ADVANTAGES if name not in (*WHITENED, "none")]
TURNS = ("turn_discounted", "turn_loo")
TOKENS = ["reinforce_pp", "gae", "grpo_turn", *TURNS]  # whose numbers differ within a sample
positive = st.integers(0, 20).map(lambda n: n / 4)


def there(*names: str) -> list[str]:
    """Return those of these estimators that exist: extensions have some of them."""
    return [name for name in names if name in ADVANTAGES]


# -- by hand ------------------------------------------------------------------------------------------------------

# Group 0: rewards 1 0 0 0, mean 1/4, unbiased deviation 1/2. Group 1: rewards 4 and 1, mean 5/2, deviation 3/sqrt(2).
SMALL, LARGE = 0.5 + EPSILON, 3 / math.sqrt(2) + EPSILON
HAND = {
    "grpo": [0.75 / SMALL] + [-0.25 / SMALL] * 4 + [1.5 / LARGE] + [-1.5 / LARGE] * 3,
    "dr_grpo": [0.75] + [-0.25] * 4 + [1.5] + [-1.5] * 3,
    "rloo": [1.0] + [-1 / 3] * 4 + [3.0] + [-3.0] * 3,
    "opo": [4 / 5] + [-1 / 5] * 4 + [9 / 4] + [-3 / 4] * 3,  # baselines 1/5 and (4 + 3 * 1) / 4
    "maxrl": [3.0] + [-1.0] * 4 + [3 / 5] + [-3 / 5] * 3,
    # k = 2: group 0 has 3 wrong of 4, p = 1 - 3/6, s = 1/2, and a wrong one 1/2 - C(2,1)/C(3,1); group 1 is all right
    "pass_at_k": [0.5 / 0.5] + [(0.5 - 2 / 3) / 0.5] * 4 + [0.0] * 4,
    "grpo_passk": [1.0 / SMALL] + [0.0] * 4 + [3.0 / LARGE] + [0.0] * 3,
    "reinforce_pp": whitened(1, 0, 0, 0, 0, 4, 0.25, 0.5, 1),  # gamma 1/2: the last sample's 1 is 1/2 and 1/4 before
    "reinforce_pp_baseline": whitened(0.75, *[-0.25] * 4, 1.5, *[-1.5] * 3),
    "grpo_turn": [0.75 / SMALL] + [-0.25 / SMALL] * 4 + [1.5 / LARGE] + [-1.5 / LARGE] * 3,  # single turns
    "gae": whitened(1, 0, 0, 0, 0, 4, 0.25, 0.5, 1),  # values 0, lambda 1
    "none": [0.0] * 9,
    # single turns of one prompt: whole episodes
    "turn_discounted": [1.0] + [-1 / 3] * 4 + [3.0] + [-3.0] * 3,
    "turn_loo": [1.0] + [-1 / 3] * 4 + [3.0] + [-3.0] * 3,
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_numbers_by_hand(name: str) -> None:
    table = replace(TWO, values=torch.zeros(TWO.num_tokens, dtype=torch.float64))
    assert estimated(name, table, discount=0.5, k=2) == pytest.approx(HAND[name], abs=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimators_that_compare_groups_say_so(name: str) -> None:
    """The others give a group the same numbers whatever the rewards of another are: it can be trained in parts."""
    values = torch.zeros(TWO.num_tokens, dtype=torch.float64)
    other = make([1, 2, 1, 1, 1, 3], [1.0, 0.0, 0.0, 0.0, 9.0, 1.0], [0, 0, 0, 0, 1, 1])
    first = [estimated(name, replace(table, values=values), discount=0.5, k=2)[:5] for table in (TWO, other)]
    assert (first[0] != first[1]) == ADVANTAGES.find(Choice(name=name)).traits.whole_batch


def test_rewards_of_turns_and_tokens_count_for_the_episode() -> None:
    table = make([2, 1], [1.0, 0.0], token_reward=[0.5, 0.5, 0.0])
    assert estimated("dr_grpo", table) == [1.0, 1.0, -1.0]


def test_episode_reward_is_at_its_last_token_beside_turns() -> None:
    table = make([2, 0, 1], [1.0, 5.0, 2.0], token_reward=[0.25, 0.5, 0.0])
    assert table.turns.token_rewards().tolist() == [0.25, 1.5, 2.0]


# -- for every batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", there("grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k"))
@few
@given(table=tables(min_length=1, rewards=positive), k=st.integers(1, 4))
def test_advantages_of_a_group_sum_to_zero(name: str, table: LossRows, k: int) -> None:
    advantages = advantage(name, k=k, correct_above=2.0)(table)[last_rows(table)]
    sums = torch.zeros(table.num_groups, dtype=torch.float64).index_add(0, table.group, advantages)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WHITENED)
@few
@given(table=tables(min_length=1))
def test_whitened_advantages_have_mean_zero_and_variance_one(name: str, table: LossRows) -> None:
    advantages = advantage(name)(table)
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-9)
    if bool((advantages != 0).any()):
        assert float(advantages.var()) == pytest.approx(1, abs=1e-4)  # but for WHITEN_EPSILON


@pytest.mark.parametrize(
    "name", there("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "grpo_turn", *TURNS, *WHITENED[:2])
)
@few
@given(table=tables(), shift=st.integers(-8, 8))
def test_shift_of_all_rewards_changes_nothing(name: str, table: LossRows, shift: int) -> None:
    shifted = replace(table, reward=table.reward + shift)
    assert estimated(name, shifted) == pytest.approx(estimated(name, table), abs=1e-9)


@pytest.mark.parametrize("name", there("grpo", "grpo_turn", "grpo_passk", "maxrl", "pass_at_k", *WHITENED[:2]))
@few
@given(table=tables(rewards=positive), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_scale_of_rewards_cancels_where_they_are_divided(name: str, table: LossRows, scale: float) -> None:
    scaled = replace(table, reward=scale * table.reward)
    assert estimated(name, scaled) == pytest.approx(estimated(name, table), abs=1e-4)  # the epsilons do not scale


@pytest.mark.parametrize("name", there("dr_grpo", "rloo", "opo", *TURNS))
@few
@given(table=tables(), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_scale_of_rewards_stays_where_they_are_not(name: str, table: LossRows, scale: float) -> None:
    expected = [scale * value for value in estimated(name, table)]
    assert estimated(name, replace(table, reward=scale * table.reward)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", there("grpo", "dr_grpo", "rloo", "opo", "maxrl"))
@few
@given(table=tables(min_length=1, rewards=positive))
def test_higher_reward_in_a_group_has_the_higher_advantage(name: str, table: LossRows) -> None:
    advantages = advantage(name)(table)[last_rows(table)]
    higher = (table.reward[:, None] > table.reward) & (table.group[:, None] == table.group)
    assert bool((advantages[:, None] > advantages)[higher].all())


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [0.0, 0.0]])
def test_group_without_differences_has_exactly_no_advantage(name: str, rewards: list[float]) -> None:
    other, sizes = [1.0, 0.0, 0.0], [2, 1, 3]
    table = make([2] * len(rewards) + sizes, [*rewards, *other], [0] * len(rewards) + [1] * 3)
    assert estimated(name, table, k=1)[: 2 * len(rewards)] == [0.0] * 2 * len(rewards)
    assert any(estimated(name, table, k=1)[2 * len(rewards) :])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [0.0, 0.0]])
def test_batch_without_differences_has_exactly_no_advantage(name: str, rewards: list[float]) -> None:
    assert estimated(name, make([2] * len(rewards), rewards)) == [0.0] * 2 * len(rewards)


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(table=tables(turns=3, rewards=positive), shuffler=st.randoms())
def test_order_of_groups_and_members_does_not_matter(name: str, table: LossRows, shuffler) -> None:
    estimator = advantage(name, discount=0.9, gae_lambda=0.8, k=2)
    moved, where = reordered(table, shuffler.sample(range(table.num_samples), table.num_samples))
    expected = estimator(table)[where]
    torch.testing.assert_close(estimator(moved), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@few
@given(table=tables(turns=2, rewards=positive))
def test_appending_a_sample_that_wrote_nothing_changes_nothing(name: str, table: LossRows) -> None:
    assert estimated(name, with_empty(table)) == estimated(name, table)


def test_empty_sample_counts_among_samples_not_among_tokens() -> None:
    table = make([1, 1], [1.0, 0.0])
    assert estimated("dr_grpo", with_empty(table, group=0)) == pytest.approx([1 - 8 / 3, -8 / 3])  # its reward is 7
    if "opo" in ADVANTAGES:
        assert estimated("opo", with_empty(table, group=0)) == estimated("opo", table)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in TOKENS])
@few
@given(table=tables(turns=2, rewards=positive))
def test_tokens_of_a_sample_share_one_advantage(name: str, table: LossRows) -> None:
    advantages = advantage(name)(table)
    assert advantages.tolist() == table.per_token(_last(advantages, table)).tolist()


def _last(values: torch.Tensor, table: LossRows) -> torch.Tensor:
    of_samples = torch.zeros(table.num_samples, dtype=values.dtype)
    rows = last_rows(table)
    of_samples[table.sample[rows]] = values[rows]
    return of_samples


@few
@given(tables())
def test_rloo_is_dr_grpo_times_n_over_n_minus_one(table: LossRows) -> None:
    sizes = torch.bincount(table.group)[table.group][table.sample].double()
    expected = advantage("dr_grpo")(table) * sizes / (sizes - 1).clamp(min=1)
    torch.testing.assert_close(advantage("rloo")(table), expected, rtol=1e-12, atol=1e-12)


# -- whitening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
def test_equal_values_are_whitened_to_nothing_at_all(value: float) -> None:
    """Their mean, rounded, is not always one of them: what is left would be a gradient."""
    for count in range(1, 40):
        assert not whiten(numbers([value] * count)).any()


@few
@given(st.lists(quarters, min_size=2, max_size=9))
def test_whitening_twice_is_whitening_once(values: list[float]) -> None:
    once = whiten(numbers(values))
    torch.testing.assert_close(whiten(once), once, rtol=0, atol=1e-6)
