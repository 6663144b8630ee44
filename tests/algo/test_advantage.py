"""Advantages against numbers worked out by hand, and what must hold for every group."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import ADVANTAGES, EPSILON, dr_grpo, grpo

groups = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=8)


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # mean 0.25, deviation sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75 / (0.5 + EPSILON)] + [-0.25 / (0.5 + EPSILON)] * 3)
    # mean 2, deviation sqrt(2)
    assert grpo([1.0, 3.0]) == pytest.approx([-1 / (math.sqrt(2) + EPSILON), 1 / (math.sqrt(2) + EPSILON)])


def test_dr_grpo_only_takes_the_mean_off() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert dr_grpo([4.0, 1.0, 1.0]) == [2.0, -1.0, -1.0]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(groups)
def test_group_sums_to_zero_and_keeps_the_order_of_rewards(name: str, rewards: list[float]) -> None:
    found = ADVANTAGES[name](rewards)
    assert sum(found) == pytest.approx(0, abs=1e-9)
    pairs = [(a, b) for a in range(len(rewards)) for b in range(len(rewards)) if rewards[a] < rewards[b]]
    assert all(found[a] < found[b] for a, b in pairs)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(groups, st.integers(-8, 8))
def test_shift_of_all_rewards_changes_nothing(name: str, rewards: list[float], shift: int) -> None:
    found = ADVANTAGES[name]([reward + shift for reward in rewards])
    assert found == pytest.approx(ADVANTAGES[name](rewards), abs=1e-9)


@given(groups, st.sampled_from([0.5, 2.0, 10.0]))
def test_scale_of_rewards_cancels_in_grpo_and_stays_in_dr_grpo(rewards: list[float], scale: float) -> None:
    scaled = [scale * reward for reward in rewards]
    assert grpo(scaled) == pytest.approx(grpo(rewards), abs=1e-4)  # EPSILON does not scale
    assert dr_grpo(scaled) == pytest.approx([scale * value for value in dr_grpo(rewards)], abs=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [0.0, 0.0]])
def test_group_without_differences_has_no_signal(name: str, rewards: list[float]) -> None:
    assert ADVANTAGES[name](rewards) == [0.0] * len(rewards)
