"""Losses against numbers worked out by hand, their gradients where the steps start, and whatever split they meet."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.loss import LOSSES
from asyncrl.algo.table import LossRows
from tests.algo.tables import CLIP, batch, both, correction, few, logs, loss, make, numbers, phi, rows_of, tables

CLIPPING = [name for name in ("ppo", "gspo", "gspo_token", "minirl") if name in LOSSES]


# -- by hand ------------------------------------------------------------------------------------------------------

# Ratios 1, 2 (above 1.3), 2, 1/2 (below 0.8), 1/2 and 1.1 of single tokens, each a sample of its own.
NEW = [0.2, 0.4, 0.4, 0.1, 0.1, 0.22]
SINGLE = batch([1] * 6, [0.2] * 6, [3.0, 1.0, -1.0, 1.0, -1.0, 2.0])
LOGS = [math.log(p) for p in NEW]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gate(ratio: float, temperature: float) -> float:
    return 4 / temperature * sigmoid(temperature * (ratio - 1))


def slope(ratio: float, temperature: float) -> float:
    """Return the derivative of the gate with respect to log r."""
    s = sigmoid(temperature * (ratio - 1))
    return 4 * s * (1 - s) * ratio


CLIPPED = ([-3.0, -1.3, 2.0, -0.5, 0.8, -2.2], [-3.0, 0.0, 2.0, -0.5, 0.0, -2.2])
VESPO = [-3.0, -phi(2, 2, 3), phi(2, 3, 2), -phi(0.5, 2, 3), phi(0.5, 3, 2), -2 * phi(1.1, 2, 3)]
CISPO = [-3.0, -1.3, 1.3, -0.5, 0.5, -2.2]
PLAIN = [-3.0, -2.0, 2.0, -0.5, 0.5, -2.2]
MINIRL = [-3.0, 0.0, 2.0, -0.5, 0.0, -2.2]
TOPR = [-3.0, -1.0, 1.0, -1.0, 0.5, -2.0]


def times_logs(weights: list[float]) -> tuple[list[float], list[float]]:
    """Loss and gradient of fixed weights times log pi."""
    return [weight * value for weight, value in zip(weights, LOGS, strict=True)], weights


HAND = {
    "ppo": CLIPPED,
    "gspo": CLIPPED,  # of single tokens
    "gspo_token": CLIPPED,
    "cispo": times_logs(CISPO),
    "sapo": (
        [-3 * gate(1, 1), -gate(2, 1), gate(2, 2), -gate(0.5, 1), gate(0.5, 2), -2 * gate(1.1, 1)],
        [-3.0, -slope(2, 1), slope(2, 2), -slope(0.5, 1), slope(0.5, 2), -2 * slope(1.1, 1)],
    ),
    "policy_gradient": times_logs(PLAIN),
    "minirl": times_logs(MINIRL),
    # probabilities moved by 0, 0.2, 0.2, -0.1, -0.1, 0.02: the second by more than 0.15 the way its advantage wants
    "dppo_tv": times_logs([-3.0, 0.0, 2.0, -0.5, 0.5, -2.2]),
    "topr": times_logs(TOPR),
    "vespo": times_logs(VESPO),
    "m2po": (PLAIN, PLAIN),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_and_gradients_by_hand(name: str) -> None:
    losses, gradient = both(name, logs(*NEW), SINGLE, trust=0.15, down=2.0)
    assert losses == pytest.approx(HAND[name][0], abs=1e-12)
    assert gradient == pytest.approx(HAND[name][1], abs=1e-12)


def test_gspo_clips_the_geometric_mean_of_a_sequence() -> None:
    # Sequence ratios sqrt(2 * 1/2) = 1 and sqrt(2 * 2) = 2
    rows = batch([2, 2], [0.2] * 4, [1.0, 1.0, 1.0, 1.0])
    losses, gradient = both("gspo", logs(0.4, 0.1, 0.4, 0.4), rows)
    assert losses == pytest.approx([-1.0, -1.0, -1.3, -1.3])
    assert gradient == pytest.approx([-1.0, -1.0, 0.0, 0.0])  # of the sum of both losses: s/2 from each


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    rows = batch([1] * 3, [0.1] * 3, [-1.0, -1.0, 1.0])
    losses, gradient = both("ppo", logs(0.5, 0.2, 0.5), rows, dual_clip=3.0)
    assert losses == pytest.approx([3.0, 2.0, -1.3])  # 5 is cut at 3
    assert gradient == pytest.approx([0.0, 2.0, 0.0])


def test_proximal_losses_do_not_see_the_engine() -> None:
    rows = replace(SINGLE, behaviour=logs(*[0.3] * 6))
    for name in LOSSES:
        same = both(name, logs(*NEW), rows) == both(name, logs(*NEW), SINGLE)
        assert same == (not loss(name).traits.corrects)
        other = replace(SINGLE, proximal=logs(*[0.3] * 6))
        assert (both(name, logs(*NEW), other) == both(name, logs(*NEW), SINGLE)) == loss(name).traits.corrects


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_far_tokens_stay_finite_in_single_precision(name: str, advantage: float, gap: float) -> None:
    rows = replace(make([2, 1], [0.0, 0.0]), proximal=numbers([-1.0] * 3), advantages=numbers([advantage] * 3))
    logprobs = rows.behaviour + gap
    losses, gradient = both(name, logprobs.float(), rows.rows(torch.arange(3), torch.float32))
    assert all(map(math.isfinite, losses + gradient))


# -- where the steps start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clip", [0.0, 0.2])
@few
@given(table=tables(min_length=1))
def test_gradient_at_the_start_is_the_plain_policy_gradient(name: str, clip: float, table: LossRows) -> None:
    if loss(name).traits.per_sequence:
        table = replace(table, advantages=table.per_token(table.reward))
    start = table.behaviour
    _, gradient = both(name, start, replace(table, proximal=start), clip_low=clip, clip_high=clip, trust=0.1)
    assert gradient == pytest.approx((-table.advantages).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if not loss(name).traits.corrects])
@few
@given(table=tables(min_length=1))
def test_corrected_gradient_is_that_times_the_capped_weight(name: str, table: LossRows) -> None:
    if loss(name).traits.per_sequence:
        table = replace(table, advantages=table.per_token(table.reward))
    leaf = table.proximal.clone().requires_grad_()
    factor = correction(leaf, table, "tis_sequence", cap=1.1)
    (factor * loss(name, **CLIP)(leaf, table)).sum().backward()
    weight = table.per_token(table.sum_per_sample(table.proximal - table.behaviour).exp().clamp(max=1.1))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -weight * table.advantages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weight", ["tis", "tis_sequence", "icepop"])
@few
@given(table=tables())
def test_correction_between_equal_policies_changes_no_bit(name: str, weight: str, table: LossRows) -> None:
    table = replace(table, proximal=table.behaviour)
    logprobs = table.behaviour + 0.1 * table.column("values")
    losses = loss(name, **CLIP)(logprobs, table)
    assert (correction(logprobs, table, weight) * losses).tolist() == losses.tolist()


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, 1.0), (0.5, -1.0)])
def test_step_that_has_gone_far_enough_has_no_gradient(name: str, ratio: float, advantage: float) -> None:
    assert both(name, logs(0.2 * ratio), batch([1], [0.2], [advantage]))[1] == [0.0]


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, -1.0), (0.5, 1.0)])
def test_step_in_the_wrong_direction_is_never_clipped(name: str, ratio: float, advantage: float) -> None:
    gradient = both(name, logs(0.2 * ratio), batch([1], [0.2], [advantage]))[1]
    assert gradient == pytest.approx([-ratio * advantage])


@pytest.mark.parametrize("name", LOSSES)
def test_token_without_advantage_has_no_gradient(name: str) -> None:
    assert both(name, logs(0.1, 0.5), batch([1, 1], [0.2, 0.2], [0.0, 0.0]))[1] == [0.0, 0.0]


# -- whatever the split -----------------------------------------------------------------------------------------------

EVERYTHING: Any = {"cap": 1.5, "floor": 0.5, "sequence": (0.5, 3.0), "geometric": (0.8, 1.2), "opsm": 0.2, "lag": 3}


@pytest.mark.parametrize("name", LOSSES)
@few
@given(table=tables(), weight=st.sampled_from(["tis", "tis_sequence", "icepop"]), data=st.data())
def test_loss_and_gradient_do_not_depend_on_split_and_order(
    name: str, table: LossRows, weight: str, data: st.DataObject
) -> None:
    table = replace(table, weights=table.column("values").abs())
    order = data.draw(st.permutations(range(table.num_samples)))
    cuts = sorted(data.draw(st.sets(st.integers(1, table.num_samples), max_size=3)))

    def run(parts: list[list[int]]) -> tuple[float, Tensor]:
        leaf = (table.behaviour + 0.3 * table.column("values")).requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            where = rows_of(table, part)
            rows, logprobs = table.rows(where, torch.float64), leaf[where]
            losses = correction(logprobs, rows, weight, **EVERYTHING) * loss(name, **CLIP)(logprobs, rows)
            total = total + (rows.weights * losses).sum()
        total.backward()
        assert leaf.grad is not None
        return total.item(), leaf.grad

    whole = run([list(range(table.num_samples))])
    split = run([list(order[i:j]) for i, j in zip([0, *cuts], [*cuts, len(order)], strict=True)])
    assert split[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-12)
