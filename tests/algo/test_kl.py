"""Estimators of the KL by hand, and what each is worth as a loss: exact sums over the words of a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.kl import ESTIMATORS
from tests.algo.tables import few, logs, numbers

logits = st.lists(st.floats(-2, 2), min_size=5, max_size=5).map(numbers)


def distribution(of: Tensor) -> Tensor:
    return torch.log_softmax(of, dim=0)


def true_kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum()


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf)[0]


def expected(name: str, policy: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return the expected estimator over words sampled from `behaviour`; the words themselves have no gradient."""
    return (behaviour.exp().detach() * ESTIMATORS[name](policy, reference, behaviour.detach())).sum()


def test_numbers_by_hand() -> None:
    policy, reference, behaviour = logs(0.5, 0.2, 0.4), logs(0.25, 0.4, 0.4), logs(0.25, 0.1, 0.8)
    x = [math.log(2), -math.log(2), 0.0]
    k3 = [0.5 - 1 + x[0], 2 - 1 + x[1], 0.0]
    by_hand = {"k1": x, "k2": [v * v / 2 for v in x], "k3": k3, "ratio": [2 * k3[0], 2 * k3[1], 0.0]}
    assert by_hand.keys() == ESTIMATORS.keys()
    for name, values in by_hand.items():
        assert ESTIMATORS[name](policy, reference, behaviour).tolist() == pytest.approx(values, abs=1e-12)


@few
@given(logits, logits)
def test_expectation_of_all_but_k2_is_the_kl(policy: Tensor, reference: Tensor) -> None:
    pi, other = distribution(policy), distribution(reference)
    for name in ("k1", "k3", "ratio"):
        assert float(expected(name, pi, other, pi)) == pytest.approx(float(true_kl(pi, other)), abs=1e-12)


@few
@given(logits, logits)
def test_k3_is_never_negative(policy: Tensor, reference: Tensor) -> None:
    pi, other = distribution(policy), distribution(reference)
    assert bool((ESTIMATORS["k3"](pi, other, pi) >= -1e-15).all())


@few
@given(logits, logits)
def test_gradients_over_words_of_the_policy_itself(policy: Tensor, reference: Tensor) -> None:
    leaf = policy.requires_grad_()
    pi, other = distribution(leaf), distribution(reference)
    kl, reverse = gradient(true_kl(pi, other), leaf), gradient(true_kl(other, distribution(leaf)), leaf)
    worth = {"k1": torch.zeros_like(kl), "k2": kl, "k3": reverse, "ratio": kl}
    for name, value in worth.items():
        found = gradient(expected(name, pi := distribution(leaf), other, pi), leaf)
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


@few
@given(logits, logits, logits)
def test_ratio_has_the_gradient_of_the_kl_over_older_words(policy: Tensor, reference: Tensor, older: Tensor) -> None:
    leaf = policy.requires_grad_()
    other, mu = distribution(reference), distribution(older)
    found = gradient(expected("ratio", distribution(leaf), other, mu), leaf)
    torch.testing.assert_close(found, gradient(true_kl(distribution(leaf), other), leaf), rtol=1e-9, atol=1e-12)


def test_k2_and_k3_over_words_of_an_older_policy_are_off() -> None:
    leaf = numbers([1.0, 0.0, -1.0, 0.5, 0.0]).requires_grad_()
    other, mu = distribution(numbers([0.0] * 5)), distribution(numbers([-1.0, 1.0, 0.0, 0.0, 2.0]))
    kl = gradient(true_kl(distribution(leaf), other), leaf)
    for name in ("k1", "k2", "k3"):
        assert float((gradient(expected(name, distribution(leaf), other, mu), leaf) - kl).abs().max()) > 0.01


@few
@given(logits)
def test_equal_policies_have_no_kl(policy: Tensor) -> None:
    pi = distribution(policy)
    for estimator in ESTIMATORS.values():
        assert estimator(pi, pi, pi - 1.0).tolist() == [0.0] * 5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_far_words_stay_finite_in_single_precision(name: str) -> None:
    leaf = torch.tensor([-200.0, -0.1], requires_grad=True)
    values = ESTIMATORS[name](leaf, leaf.detach().flip(0), leaf.detach().flip(0))
    assert bool(values.isfinite().all())
    assert bool(gradient(values.sum(), leaf).isfinite().all())
