"""Weights and masks for the gap between engine and trainer, by hand and where there is no gap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.correction import CORRECTIONS, log_linear_proximal
from asyncrl.algo.masks import MASKS
from asyncrl.algo.table import LossRows
from asyncrl.config.algorithm import MaskConfig
from tests.algo.tables import correction, few, logs, make, tables

# Two sequences: rho 1/2, 4 (product 2, geometric mean sqrt 2) and 3, 1, 1/9 (product 1/3, geometric mean 3^(-1/3)).
GAPS = replace(
    make([2, 3], [0.0, 0.0], advantages=[-1.0] * 5, lag=[0, 1, 1, 2, 3]),
    behaviour=logs(0.2, 0.1, 0.1, 0.4, 0.9),
    proximal=logs(0.1, 0.4, 0.3, 0.4, 0.1),
)


def factor(rows: LossRows = GAPS, **settings: Any) -> list[float]:
    return correction(rows.proximal, rows, **settings).tolist()


WEIGHTS_BY_HAND = {
    "tis": [0.5, 2.0, 2.0, 1.0, 0.25],
    "tis_sequence": [2.0, 2.0, 1 / 3, 1 / 3, 1 / 3],
    "icepop": [0.5, 0.0, 0.0, 1.0, 0.0],
}
MASKS_BY_HAND = [
    ("sequence", (0.5, 2.5), [1, 1, 0, 0, 0]),
    ("sequence", (0.3, 1.5), [0, 0, 1, 1, 1]),
    ("geometric", (0.6, 1.3), [0, 0, 1, 1, 1]),
    ("geometric", (0.7, 1.5), [1, 1, 0, 0, 0]),
    ("opsm", 0.3, [1, 1, 0, 0, 0]),  # means of l_mu - l: -log(2)/2 and log(3)/3 = 0.366
    ("opsm", 0.4, [1, 1, 1, 1, 1]),
    ("lag", 1, [1, 1, 1, 0, 0]),
]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_by_hand(name: str) -> None:
    assert factor(name=name, floor=0.25) == pytest.approx(WEIGHTS_BY_HAND[name])


@pytest.mark.parametrize(("name", "setting", "kept"), MASKS_BY_HAND)
def test_masks_by_hand(name: str, setting: object, kept: list[int]) -> None:
    assert factor(**{name: setting}) == [float(one) for one in kept]
    assert {name for name, _, _ in MASKS_BY_HAND} == MASKS.keys()


def test_floor_and_cap_cut_the_product_of_a_sequence() -> None:
    found = factor(name="tis_sequence", cap=1.5, floor=0.5)
    assert found == pytest.approx([1.5] * 2 + [0.5] * 3)


def test_without_a_weight_every_token_counts_once() -> None:
    assert factor() == [1.0] * 5


def test_masks_combine_with_each_other_and_with_the_weight() -> None:
    found = factor(name="tis", lag=0, geometric=(0.7, 1.5))
    assert found == pytest.approx([0.5, 0.0, 0.0, 0.0, 0.0])


def test_every_mask_has_a_setting() -> None:
    assert MaskConfig.model_fields.keys() == MASKS.keys()


def test_opsm_masks_negative_advantages_alone() -> None:
    rows = replace(GAPS, advantages=torch.tensor([-1.0, -1.0, 0.0, 1.0, -1.0], dtype=torch.float64))
    assert factor(rows, opsm=0.3) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_opsm_measures_the_policy_in_training() -> None:
    gone = GAPS.proximal - 1.0  # all tokens are e times less likely than at the start
    assert correction(gone, GAPS, opsm=0.4).tolist() == [0.0] * 5  # 1 more than at the start
    assert correction(gone, GAPS, opsm=0.7).tolist() == [1.0] * 2 + [0.0] * 3
    for settings in ({"sequence": (0.5, 2.5)}, {"geometric": (0.7, 1.5)}, {"name": "tis"}):
        assert correction(gone, GAPS, **settings).tolist() == factor(**settings)


@pytest.mark.parametrize("name", CORRECTIONS)
@few
@given(table=tables(), cap=st.sampled_from([1.0, 2.0]), floor=st.sampled_from([0.0, 0.5, 1.0]))
def test_weight_between_equal_policies_is_exactly_one(name: str, table: LossRows, cap: float, floor: float) -> None:
    same = replace(table, proximal=table.behaviour)
    assert factor(same, name=name, cap=cap, floor=floor) == [1.0] * table.num_tokens


@few
@given(tables())
def test_masks_between_equal_policies_keep_everything(table: LossRows) -> None:
    same = replace(table, proximal=table.behaviour)
    tight = {"sequence": (1.0, 1.0), "geometric": (1.0, 1.0), "opsm": 0.0, "lag": 9}
    assert factor(same, **tight) == [1.0] * table.num_tokens


@few
@given(tables())
def test_masked_token_changes_no_weight_of_the_others(table: LossRows) -> None:
    plain = factor(table, name="tis")
    masked = factor(table, name="tis", lag=1, geometric=(0.9, 1.1))
    assert all(new in (0.0, old) for new, old in zip(masked, plain, strict=True))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_has_no_gradient(name: str) -> None:
    leaf = GAPS.proximal.clone().requires_grad_()
    masks: Any = {"opsm": 0.3, "geometric": (0.1, 9.0), "sequence": (0.1, 9.0), "lag": 9}
    assert not correction(leaf, GAPS, name, **masks).requires_grad


def test_proximal_policy_between_engine_and_trainer_by_hand() -> None:
    rows = make([5], [0.0], lag=[0, 1, 2, 3, 5])  # the engine's are -1
    logprobs = torch.full((5,), -2.0, dtype=torch.float64, requires_grad=True)
    found = log_linear_proximal(logprobs, rows)
    assert found.tolist() == pytest.approx([-1.0, -1.0, -1.5, -1 - 2 / 3, -1.8])
    assert not found.requires_grad


@few
@given(tables())
def test_proximal_policy_of_tokens_one_version_old_is_engines(table: LossRows) -> None:
    fresh = replace(table, lag=table.lag.clamp(max=1))
    assert log_linear_proximal(table.column("values"), fresh).tolist() == table.behaviour.tolist()
