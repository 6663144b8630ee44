"""Decisions over the whole batch: by hand, minimal, and the same in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.table import LossRows
from asyncrl.extensions.papers.loss import least_deviating
from tests.algo.tables import few, make, numbers, reordered, tables, with_empty

thresholds = st.sampled_from([1e-6, 0.01, 0.04, 0.09, 1.0, 100.0])


def moved(gaps: list[float], advantages: list[float]) -> LossRows:
    """Tokens whose log pi_p / mu are these, in samples of one token."""
    made = make([1] * len(gaps), [0.0] * len(gaps), advantages=advantages)
    return replace(made, proximal=made.behaviour + numbers(gaps))


def kept(table: LossRows, threshold: float) -> list[bool]:
    return least_deviating(table, threshold=threshold).tolist()


# Squares of what counts: 0.01, 0.04, 0.16; of the others (moved the other way, or without advantage) 1 and 1
GAPS, ADVANTAGES = [0.1, -0.2, 0.4, 1.0, -1.0, 1.0], [1.0, -1.0, 2.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.08, [1, 1, 1, 1, 1, 1]),  # the mean of the three is 0.07
        (0.06, [1, 1, 0, 1, 1, 1]),  # of the smaller two 0.025
        (0.02, [1, 0, 0, 1, 1, 1]),
        (0.005, [0, 0, 0, 1, 1, 1]),
    ],
)
def test_tokens_that_m2po_leaves_out_by_hand(threshold: float, expected: list[int]) -> None:
    assert kept(moved(GAPS, ADVANTAGES), threshold) == [bool(one) for one in expected]


def test_tokens_equally_far_out_are_left_out_together() -> None:
    assert kept(moved([0.5, 0.125, 0.5], [1.0] * 3), 0.15) == [False, True, False]  # one of the two would have room


def test_token_already_left_out_neither_counts_nor_comes_back() -> None:
    table = replace(moved([0.4, 0.1, 0.3], [1.0] * 3), keep=torch.tensor([False, True, True]))
    assert kept(table, 0.06) == [False, True, True]  # (0.01 + 0.09) / 2; with the first it would be 0.087
    small = replace(moved([0.05, 0.4, 0.1], [1.0] * 3), keep=torch.tensor([False, True, True]))
    assert kept(small, 0.06) == [False, False, True]  # (0.01 + 0.16) / 2 is too much; with the first it would be 0.057


def test_batch_without_tokens_or_without_a_gap_is_kept() -> None:
    assert kept(make([0], [0.0], proximal=[], advantages=[]), 0.04) == []
    assert kept(moved([0.0, 0.0], [1.0, -1.0]), 1e-9) == [True, True]


@few
@given(tables(), thresholds)
def test_kept_tokens_meet_the_threshold_and_are_the_most(table: LossRows, threshold: float) -> None:
    keep = least_deviating(table, threshold=threshold)
    log_ratio = table.proximal - table.behaviour
    outward = (log_ratio * table.advantages) > 0
    assert bool(keep[~outward].all())
    inside, outside = (log_ratio[outward & keep] ** 2), (log_ratio[outward & ~keep] ** 2)
    if len(inside):
        assert float(inside.mean()) <= threshold * (1 + 1e-12)
    if len(outside):
        assert not len(inside) or float(inside.max()) < float(outside.min())
        assert float(torch.cat([inside, outside.min()[None]]).mean()) > threshold * (1 - 1e-12)


@few
@given(tables(), thresholds, st.randoms())
def test_selection_does_not_depend_on_the_order(table: LossRows, threshold: float, shuffler) -> None:
    order, where = reordered(table, shuffler.sample(range(table.num_samples), table.num_samples))
    expected = least_deviating(table, threshold=threshold)
    assert least_deviating(order, threshold=threshold).tolist() == expected[where].tolist()


@few
@given(tables(), thresholds)
def test_appending_a_sample_that_wrote_nothing_changes_nothing(table: LossRows, threshold: float) -> None:
    expected = least_deviating(table, threshold=threshold)
    assert least_deviating(with_empty(table), threshold=threshold).tolist() == expected.tolist()


def test_decision_over_parts_of_the_batch_would_be_another() -> None:
    table = moved([0.3, 0.1], [1.0, 1.0])
    parts = [kept(moved([gap], [1.0]), 0.06)[0] for gap in (0.3, 0.1)]
    assert (kept(table, 0.06), parts) == ([True, True], [False, True])  # why micro-batches must not decide
