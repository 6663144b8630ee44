"""Weights and masks for the gap between engine and trainer, by hand and where there is no gap."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.correction import MASKS, WEIGHTS, CorrectionParams, correction, log_linear_proximal
from asyncrl.algo.table import TokenTable, known
from tests.algo.tables import few, logs, make, tables

# Two sequences: rho 1/2, 4 (product 2, geometric mean sqrt 2) and 3, 1, 1/9 (product 1/3, geometric mean 3^(-1/3)).
GAPS = replace(
    make([2, 3], [0.0, 0.0], advantages=[-1.0] * 5, lag=[0, 1, 1, 2, 3]),
    behaviour=logs(0.2, 0.1, 0.1, 0.4, 0.9),
    proximal=logs(0.1, 0.4, 0.3, 0.4, 0.1),
)
NONE = CorrectionParams(None)


def factor(rows: TokenTable = GAPS, **settings) -> list[float]:
    return correction(known(rows.proximal), rows, replace(NONE, **settings)).tolist()


WEIGHTS_BY_HAND = {
    "tis": [0.5, 2.0, 2.0, 1.0, 0.25],
    "tis_sequence": [2.0, 2.0, 1 / 3, 1 / 3, 1 / 3],
    "icepop": [0.5, 0.0, 0.0, 1.0, 0.0],
}
MASKS_BY_HAND = [
    ("mask_sequence", (0.5, 2.5), [1, 1, 0, 0, 0]),
    ("mask_sequence", (0.3, 1.5), [0, 0, 1, 1, 1]),
    ("mask_geometric", (0.6, 1.3), [0, 0, 1, 1, 1]),
    ("mask_geometric", (0.7, 1.5), [1, 1, 0, 0, 0]),
    ("mask_opsm", 0.3, [1, 1, 0, 0, 0]),  # means of l_mu - l: -log(2)/2 and log(3)/3 = 0.366
    ("mask_opsm", 0.4, [1, 1, 1, 1, 1]),
    ("mask_lag", 1, [1, 1, 1, 0, 0]),
]


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_by_hand(name: str) -> None:
    assert factor(correction=name, correction_floor=0.25) == pytest.approx(WEIGHTS_BY_HAND[name])


@pytest.mark.parametrize(("name", "setting", "kept"), MASKS_BY_HAND)
def test_masks_by_hand(name: str, setting: object, kept: list[int]) -> None:
    assert factor(**{name: setting}) == [float(one) for one in kept]
    assert {name for name, _, _ in MASKS_BY_HAND} == MASKS.keys()


def test_floor_and_cap_cut_the_product_of_a_sequence() -> None:
    found = factor(correction="tis_sequence", correction_cap=1.5, correction_floor=0.5)
    assert found == pytest.approx([1.5] * 2 + [0.5] * 3)


def test_without_a_weight_every_token_counts_once() -> None:
    assert factor() == [1.0] * 5


def test_masks_combine_with_each_other_and_with_the_weight() -> None:
    found = factor(correction="tis", mask_lag=0, mask_geometric=(0.7, 1.5))
    assert found == pytest.approx([0.5, 0.0, 0.0, 0.0, 0.0])


def test_every_setting_of_a_mask_is_one_of_the_parameters() -> None:
    assert {field.name for field in fields(CorrectionParams) if field.name.startswith("mask_")} == MASKS.keys()


def test_opsm_masks_negative_advantages_alone() -> None:
    rows = replace(GAPS, advantages=torch.tensor([-1.0, -1.0, 0.0, 1.0, -1.0], dtype=torch.float64))
    assert factor(rows, mask_opsm=0.3) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_opsm_measures_the_policy_in_training_and_the_others_where_the_steps_started() -> None:
    gone = known(GAPS.proximal) - 1.0  # all tokens are e times less likely than at the start
    assert correction(gone, GAPS, replace(NONE, mask_opsm=0.4)).tolist() == [0.0] * 5  # 1 more than at the start
    assert correction(gone, GAPS, replace(NONE, mask_opsm=0.7)).tolist() == [1.0] * 2 + [0.0] * 3
    for settings in ({"mask_sequence": (0.5, 2.5)}, {"mask_geometric": (0.7, 1.5)}, {"correction": "tis"}):
        assert correction(gone, GAPS, replace(NONE, **settings)).tolist() == factor(**settings)


@pytest.mark.parametrize("name", WEIGHTS)
@few
@given(table=tables(), cap=st.sampled_from([1.0, 2.0]), floor=st.sampled_from([0.0, 0.5, 1.0]))
def test_weight_between_equal_policies_is_exactly_one(name: str, table: TokenTable, cap: float, floor: float) -> None:
    same = replace(table, proximal=table.behaviour)
    assert factor(same, correction=name, correction_cap=cap, correction_floor=floor) == [1.0] * table.num_tokens


@few
@given(tables())
def test_masks_between_equal_policies_keep_everything(table: TokenTable) -> None:
    same = replace(table, proximal=table.behaviour)
    tight = {"mask_sequence": (1.0, 1.0), "mask_geometric": (1.0, 1.0), "mask_opsm": 0.0, "mask_lag": 9}
    assert factor(same, **tight) == [1.0] * table.num_tokens


@few
@given(tables())
def test_token_that_a_mask_takes_out_changes_no_weight_of_the_others(table: TokenTable) -> None:
    plain = factor(table, correction="tis")
    masked = factor(table, correction="tis", mask_lag=1, mask_geometric=(0.9, 1.1))
    assert all(new in (0.0, old) for new, old in zip(masked, plain, strict=True))


@pytest.mark.parametrize("name", WEIGHTS)
def test_correction_has_no_gradient(name: str) -> None:
    leaf = known(GAPS.proximal).clone().requires_grad_()
    params = CorrectionParams(name, mask_opsm=0.3, mask_geometric=(0.1, 9.0), mask_sequence=(0.1, 9.0), mask_lag=9)
    assert not correction(leaf, GAPS, params).requires_grad


def test_proximal_policy_between_engine_and_trainer_by_hand() -> None:
    rows = make([5], [0.0], lag=[0, 1, 2, 3, 5])  # the engine's are -1
    logprobs = torch.full((5,), -2.0, dtype=torch.float64, requires_grad=True)
    found = log_linear_proximal(logprobs, rows)
    assert found.tolist() == pytest.approx([-1.0, -1.0, -1.5, -1 - 2 / 3, -1.8])
    assert not found.requires_grad


@few
@given(tables())
def test_proximal_policy_of_tokens_one_version_old_is_the_engines(table: TokenTable) -> None:
    fresh = replace(table, lag=table.lag.clamp(max=1))
    assert log_linear_proximal(known(table.values), fresh).tolist() == table.behaviour.tolist()
