"""What is peculiar to the algorithms of single papers; tests/algo runs over all that are registered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import EPSILON
from asyncrl.algo.table import LossRows
from asyncrl.errors import ConfigError
from tests.algo.tables import TWO, advantage, batch, both, estimated, few, logs, make, phi, tables
from tests.fakes import tiny_config


def test_pass_at_k_beyond_the_group_asks_for_one_of_all() -> None:
    assert estimated("pass_at_k", TWO, k=9) == [0.0] * 9  # any 4 of group 0 hold the right one
    wrong = make([1, 1, 1], [0.0, 0.0, 1.0])
    assert estimated("pass_at_k", wrong, k=1) == pytest.approx(
        [-(1 / 3) / math.sqrt(2 / 9)] * 2 + [(2 / 3) / math.sqrt(2 / 9)]
    )


def test_pass_at_k_counts_rewards_above_the_threshold_as_right() -> None:
    table = make([1, 1], [0.5, 1.0])
    assert estimated("pass_at_k", table, k=1, correct_above=0.5) == pytest.approx([-1.0, 1.0])
    assert estimated("pass_at_k", table, k=1, correct_above=0.25) == [0.0, 0.0]


def test_best_of_a_group_counts_only_when_it_is_alone() -> None:
    deviation = math.sqrt(1 / 3) + EPSILON
    assert estimated("grpo_passk", make([1, 1, 1], [1.0, 1.0, 0.0])) == [0.0, 0.0, 0.0]
    assert estimated("grpo_passk", make([1, 1, 1], [0.0, 1.0, 0.0])) == pytest.approx([0.0, 1 / deviation, 0.0])


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ConfigError, match=r"needs rewards of 0 or more; one is -0\.5"):
        estimated("maxrl", make([1, 1], [1.0, -0.5]))


@few
@given(tables())
def test_opo_sums_to_zero_over_the_tokens_of_a_group(table: LossRows) -> None:
    group = table.group[table.sample]
    sums = torch.zeros(table.num_groups, dtype=torch.float64).index_add(0, group, advantage("opo")(table))
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9)


@few
@given(tables())
def test_opo_of_answers_of_one_length_is_dr_grpo(table: LossRows) -> None:
    even = make([3] * table.num_samples, table.reward.tolist(), table.group.tolist())
    assert estimated("opo", even) == pytest.approx(estimated("dr_grpo", even), abs=1e-12)


@few
@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_pass_at_one_is_grpo_with_the_biased_deviation(right: list[bool]) -> None:
    table = make([1] * len(right), [float(one) for one in right])
    unbiased = math.sqrt(len(right) / (len(right) - 1))
    expected = [unbiased * value for value in estimated("grpo", table)]
    assert estimated("pass_at_k", table, k=1) == pytest.approx(expected, abs=1e-4)  # grpo's EPSILON


def test_dppo_trusts_each_direction_and_bounds_its_weight() -> None:
    rows = batch([1] * 4, [0.3, 0.3, 0.3, 0.01], [1.0, -1.0, -1.0, -1.0])
    _, gradient = both("dppo_tv", logs(0.25, 0.05, 0.15, 0.5), rows)  # moved by -0.05, -0.25, -0.15, 0.49
    assert gradient == pytest.approx([-0.25 / 0.3, 0.0, 0.5, 20.0])


def test_topr_and_vespo_weigh_the_whole_answer() -> None:
    rows = batch([2, 2], [0.2] * 4, [-1.0, -1.0, 1.0, 1.0])
    logprobs = logs(0.1, 0.3, 0.1, 0.3)  # the product is 3/4
    assert both("topr", logprobs, rows)[1] == pytest.approx([0.75, 0.75, -1.0, -1.0])
    expected = [phi(0.75, 3, 2)] * 2 + [-phi(0.75, 2, 3)] * 2
    assert both("vespo", logprobs, rows)[1] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["maxrl", "pass_at_k"])
@pytest.mark.parametrize(("field", "value"), [("overlong_buffer", 1), ("length_penalty", 0.1), ("normalize", True)])
def test_advantage_of_right_and_wrong_takes_no_shaped_rewards(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**{"algo.advantage": name, f"algo.shaping.{field}": value})
    error = refused.value
    assert (error.field, error.value) == (f"algo.shaping.{field}", value)
    tiny_config(**{"algo.advantage": "grpo", f"algo.shaping.{field}": value})


def test_selection_over_the_whole_batch_takes_no_parts() -> None:
    parts = {"rollout.batch_groups": 4, "trainer.batch_parts": 4}
    with pytest.raises(ConfigError, match="needs the whole batch") as refused:
        tiny_config(**{"algo.loss": "m2po", "algo.correction": None}, **parts)
    assert refused.value.field == "algo.loss"


def test_gspo_shares_its_gradient_and_gspo_token_keeps_it() -> None:
    rows = batch([2], [0.2, 0.2], [1.0, 3.0])
    assert both("gspo", logs(0.2, 0.2), rows)[1] == pytest.approx([-2.0, -2.0])
    assert both("gspo_token", logs(0.2, 0.2), rows)[1] == pytest.approx([-1.0, -3.0])
    moved = logs(0.2 * 1.1, 0.2 * 1.2)
    assert both("gspo_token", moved, rows)[0] == pytest.approx(both("gspo", moved, rows)[0])


@few
@given(tables(min_length=1))
def test_gspo_and_gspo_token_agree_for_one_advantage(table: LossRows) -> None:
    table = replace(table, advantages=table.per_token(table.reward))
    one, other = (both(name, table.behaviour, table) for name in ("gspo", "gspo_token"))
    assert one[0] == pytest.approx(other[0], abs=1e-12)
    assert one[1] == pytest.approx(other[1], abs=1e-12)
