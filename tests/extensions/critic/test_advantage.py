"""Generalized advantage estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.table import LossRows
from asyncrl.extensions.critic.value import gae_raw
from tests.algo.tables import estimated, few, make, numbers, tables, whitened


def test_generalised_advantages_by_hand() -> None:
    # gamma 1/2, lambda 1/2; rewards 0 1 | 2, values 1 2 | 3: deltas 0 + 1 - 1, 1 - 2 | 2 - 3, then -1/4 of the next
    table = make([2, 1], [0.0, 2.0], token_reward=[0.0, 1.0, 0.0], values=[1.0, 2.0, 3.0])
    params = {"discount": 0.5, "gae_lambda": 0.5}
    assert gae_raw(table, **params).tolist() == [-0.25, -1.0, -1.0]
    assert estimated("gae", table, **params) == pytest.approx(whitened(-0.25, -1.0, -1.0))


@few
@given(tables())
def test_lambda_one_and_gamma_one_give_return_minus_value(table: LossRows) -> None:
    rewards = table.turns.token_rewards()
    ends = table.sum_per_sample(rewards)[table.sample]
    before = torch.tensor(
        [float(rewards[:i][table.sample[:i] == table.sample[i]].sum()) for i in range(table.num_tokens)],
        dtype=torch.float64,
    )
    found = gae_raw(table, discount=1.0, gae_lambda=1.0)
    torch.testing.assert_close(found, ends - before - table.column("values"), rtol=0, atol=1e-9)


@few
@given(tables(), st.sampled_from([0.5, 0.9, 1.0]))
def test_lambda_zero_gives_the_error_of_one_step(table: LossRows, gamma: float) -> None:
    values, sample = table.column("values").tolist(), table.sample.tolist()
    after = [values[i + 1] if i + 1 < len(sample) and sample[i + 1] == sample[i] else 0.0 for i in range(len(sample))]
    expected = table.turns.token_rewards() + gamma * numbers(after) - table.column("values")
    found = gae_raw(table, discount=gamma, gae_lambda=0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@few
@given(tables())
def test_right_values_leave_no_advantage(table: LossRows) -> None:
    exact = gae_raw(
        replace(table, values=torch.zeros(table.num_tokens, dtype=torch.float64)), discount=1.0, gae_lambda=1.0
    )
    found = gae_raw(replace(table, values=exact), discount=1.0, gae_lambda=0.7)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-9)
