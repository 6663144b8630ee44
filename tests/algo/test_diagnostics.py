"""Diagnostics of a batch's log-probabilities equal values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from asyncrl.algo.diagnostics import MAX_LAG, gap_figures, loss_figures
from asyncrl.algo.table import TokenTable
from tests.algo.tables import few, logs, make, numbers, tables

ALL = torch.ones(4, dtype=torch.bool)
# rho 2, 1/2, 1 and 4
GAPS = replace(
    make([3, 1], [0.0, 0.0], lag=[0, 0, 1, 11]), behaviour=logs(0.2, 0.2, 0.2, 0.2), proximal=logs(0.4, 0.1, 0.2, 0.8)
)
LOG2 = math.log(2)


def test_gaps_by_hand() -> None:
    found = gap_figures(GAPS, ALL)
    assert found == pytest.approx(
        {
            "logprob_gap/mean": LOG2,  # (1 + 1 + 0 + 2) log 2 / 4
            "logprob_gap/max": 2 * LOG2,
            "logprob_gap/p99": 2 * LOG2,
            "logprob_gap/kl": (7.5 - 4 - 2 * LOG2) / 4,  # rho - 1 - log rho
            "correction/ess": 7.5**2 / (21.25 * 4),
            "logprob_gap/lag0": LOG2,
            "logprob_gap/lag1": 0.0,
            f"logprob_gap/lag{MAX_LAG}": 2 * LOG2,
        }
    )


def test_gaps_are_those_of_the_tokens_that_were_seen() -> None:
    found = gap_figures(GAPS, torch.tensor([True, False, True, False]))
    assert found["logprob_gap/mean"] == pytest.approx(LOG2 / 2)
    assert found["correction/ess"] == pytest.approx(9 / 10)
    assert f"logprob_gap/lag{MAX_LAG}" not in found


def test_percentile_is_the_smallest_that_99_of_100_do_not_exceed() -> None:
    table = replace(make([200], [0.0], lag=[0] * 200), proximal=numbers([-1.0 + i / 100 for i in range(200)]))
    assert gap_figures(table, torch.ones(200, dtype=torch.bool))["logprob_gap/p99"] == pytest.approx(1.97)


def test_no_token_seen_is_no_gap() -> None:
    plain = {f"logprob_gap/{name}": 0.0 for name in ("mean", "max", "p99", "kl")}
    assert gap_figures(GAPS, ~ALL) == plain | {"correction/ess": 1.0}


@few
@given(tables(min_length=1))
def test_equal_policies_have_no_gap_and_the_whole_sample(table: TokenTable) -> None:
    found = gap_figures(replace(table, proximal=table.behaviour), torch.ones(table.num_tokens, dtype=torch.bool))
    assert found.pop("correction/ess") == pytest.approx(1.0, abs=1e-12)
    assert set(found.values()) == {0.0}


@few
@given(tables(min_length=1))
def test_effective_sample_is_a_share_without_a_unit(table: TokenTable) -> None:
    seen = torch.ones(table.num_tokens, dtype=torch.bool)
    share = gap_figures(table, seen)["correction/ess"]
    assert 1 / table.num_tokens - 1e-12 <= share <= 1 + 1e-12
    moved = replace(table, proximal=table.proximal + 0.5)
    assert gap_figures(moved, seen)["correction/ess"] == pytest.approx(share)


def test_shares_of_tokens_by_hand() -> None:
    # ratios pi / pi_p 1.4, 1.4, 0.7, 0.7 with advantages + - + -: the first and the last are clipped
    table = replace(GAPS, advantages=numbers([1.0, -1.0, 1.0, -1.0]))
    logprobs = GAPS.proximal + logs(1.4, 1.4, 0.7, 0.7)
    factor = numbers([1.0, 0.0, 0.5, 2.0])
    found = loss_figures(table, logprobs, factor, ALL, cap=1.5, clip=(0.2, 0.3))
    assert found == {"correction/capped": 0.5, "correction/masked": 0.25, "loss/clipped": 0.5}
    higher = loss_figures(table, logprobs, factor, ALL, cap=1.5, clip=(0.2, 0.5))
    assert higher["loss/clipped"] == 0.25
    wide = loss_figures(table, logprobs, factor, ALL, cap=5.0, clip=(0.4, 0.5))
    assert wide == {"correction/capped": 0.0, "correction/masked": 0.25, "loss/clipped": 0.0}
    first = loss_figures(table, logprobs, factor, torch.tensor([True, False, False, False]), cap=1.5, clip=(0.2, 0.3))
    assert first == {"correction/capped": 1.0, "correction/masked": 0.0, "loss/clipped": 1.0}


def test_no_token_seen_has_no_shares() -> None:
    table = replace(GAPS, advantages=numbers([1.0] * 4))
    found = loss_figures(table, GAPS.proximal, numbers([1.0] * 4), ~ALL, cap=2.0, clip=(0.2, 0.2))
    assert set(found.values()) == {0.0}
