"""Comparisons within a group: worked examples, single episodes, and groups of equal rewards."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algo.advantage import GroupStatistics, centred, standardised
from asyncrl.algo.table import build_table
from asyncrl.schema import Group, Trajectory, Turn
from tests.fakes import completion


def groups(*rewards: list[float]) -> GroupStatistics:
    """One for each list, an episode for each reward."""
    found = [
        Group(f"g{slot}", slot, [12, 11], [Trajectory([Turn([], completion())], one) for one in some], "t")
        for slot, some in enumerate(rewards)
    ]
    return build_table(found, 0).groups


def test_mean_and_unbiased_deviation_are_those_of_the_own_group() -> None:
    found = groups([1.0, 2.0, 6.0], [5.0], [4.0, 4.0])
    assert found.sizes.tolist() == [3.0] * 3 + [1.0] + [2.0] * 2
    assert found.mean().tolist() == [3.0] * 3 + [5.0] + [4.0] * 2
    assert found.deviation().tolist() == [7**0.5] * 3 + [0.0] * 3  # of one alone, too


def test_equal_rewards_are_not_spread_whatever_their_mean() -> None:
    found = groups([0.1] * 3, [1.0, 2.0])
    assert found.spread(torch.arange(1.0, 6.0)).tolist() == [0.0] * 6 + [4.0] * 2 + [5.0] * 2


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [-2.0], [-0.3] * 7])
def test_equal_numbers_are_on_their_mean_exactly(values: list[float]) -> None:
    numbers, one = torch.tensor(values, dtype=torch.float64), torch.zeros(len(values), dtype=torch.int64)
    assert centred(numbers, one).tolist() == standardised(numbers, one).tolist() == [0.0] * len(values)


def test_numbers_are_compared_with_those_of_their_group() -> None:
    numbers, group = torch.tensor([1.0, 10.0, 3.0, 14.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    assert centred(numbers, group).tolist() == [-1.0, -2.0, 1.0, 2.0]
    small, large = 1 / (2**0.5 + 1e-6), 2 / (8**0.5 + 1e-6)  # as slime and verl do
    assert standardised(numbers, group).tolist() == pytest.approx([-small, -large, small, large], rel=1e-12)
