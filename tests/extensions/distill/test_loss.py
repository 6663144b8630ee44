"""Distillation against numbers worked out by hand, and what its two forms have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncrl.algo.branches import accumulated
from asyncrl.algo.table import LossRows, build_table
from asyncrl.extensions.distill.loss import chain, distillation_loss, distilled_advantages, tempered
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.algo.tables import advantage, loss


def turn(logprobs: list[float], teacher: list[float], observation: list[int] | None = None) -> Turn:
    tokens = len(logprobs)
    written = Completion(list(range(tokens)), logprobs, [VersionSpan(0, 0, tokens)] if tokens else [], "stop")
    return Turn(observation or [], written, teacher=teacher)


def group(*members: list[Turn]) -> Group:
    return Group("g0", 0, [12, 1, 11], [Trajectory(turns) for turns in members], "length")


def table(start: list[float], teacher: list[float], advantages: list[float], sample: list[int]) -> LossRows:
    made = build_table([group(*[[turn([0.0] * sample.count(s), [0.0] * sample.count(s))] for s in set(sample)])], 0)
    keep = torch.ones(made.num_tokens, dtype=torch.bool)
    rows = replace(made, behaviour=of(start), teacher=of(teacher)).trained(of(advantages), keep)
    return rows.with_proximal(of(start))


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the column ---------------------------------------------------------------------------------------------


def test_teachers_column_has_the_order_of_the_others() -> None:
    made = build_table(
        [group([turn([-1.0, -2.0], [-0.1, -0.2]), turn([-3.0], [-0.3], [50])], [turn([-4.0], [-0.4])])], 1
    )
    assert made.behaviour.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert made.column("teacher").tolist() == [-0.1, -0.2, -0.3, -0.4]


def test_without_a_teacher_no_column_and_half_is_an_error() -> None:
    assert build_table([group([turn([-1.0], [])])], 1).teacher is None
    with pytest.raises(ValueError, match="scored 1 of the batch's 3 tokens"):
        build_table([group([turn([-1.0, -2.0], [])], [turn([-4.0], [-0.4])])], 1)
    with pytest.raises(ValueError, match="1 log-probabilities of the teacher for 2 tokens"):
        turn([-1.0, -2.0], [-0.1])


# --- in the advantage ---------------------------------------------------------------------------------------


def test_advantage_loses_the_difference_by_hand() -> None:
    rows = table([-1.0, -2.0, -0.5], [-0.5, -2.0, -1.5], [1.0, 1.0, -2.0], [0, 0, 1])
    found = distilled_advantages(of([-1.0, -2.0, -0.5]), rows, 0.5, 0.0)
    assert found.tolist() == [1.0 + 0.25, 1.0, -2.0 - 0.5]


def test_discounted_differences_end_with_their_sample() -> None:
    rows = table([0.0] * 5, [-1.0, -2.0, -4.0, -8.0, 1.0], [0.0] * 5, [0, 0, 0, 1, 1])
    found = distilled_advantages(of([0.0] * 5), rows, 1.0, 0.5)
    assert found.tolist() == [-(1 + 1 + 1), -(2 + 2), -4.0, -(8 - 0.5), 1.0]


def test_teacher_that_equals_the_policy_gives_no_advantage() -> None:
    start = [-1.3, -0.2, -5.0]
    rows = table(start, start, [0.0] * 3, [0, 0, 0])
    for discount in (0.0, 0.9, 1.0):
        assert distilled_advantages(of(start), rows, 1.0, discount).tolist() == [0.0] * 3


def test_no_gradient_goes_through_an_advantage() -> None:
    start = of([-1.0, -2.0]).requires_grad_()
    rows = table([-1.0, -2.0], [-0.5, -1.0], [0.0, 0.0], [0, 0])
    assert not distilled_advantages(start, rows, 1.0, 0.5).requires_grad


def test_estimator_none_leaves_rewards_out() -> None:
    members = [Trajectory([turn([-1.0], [])], reward) for reward in (0.0, 1.0)]
    made = build_table([Group("g0", 0, [1], members, "length")], 0)
    assert advantage("none")(made).tolist() == [0.0, 0.0]


# --- the gradient -------------------------------------------------------------------------------------------

VOCABULARY = 5


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, and log-probabilities of the one that wrote the tokens and of the teacher."""
    generator = torch.Generator().manual_seed(seed)
    logits, other, teacher = torch.randn(3, VOCABULARY, dtype=torch.float64, generator=generator)
    return logits, torch.log_softmax(logits + 0.3 * other, -1), torch.log_softmax(teacher, -1)


def every_token(logits: Tensor, behaviour: Tensor, teacher: Tensor) -> tuple[Tensor, LossRows]:
    """One row for each token of the vocabulary: an expectation under mu is a sum of these, weighed by mu."""
    logprobs = torch.log_softmax(logits, -1)
    rows = table([0.0] * VOCABULARY, [0.0] * VOCABULARY, [0.0] * VOCABULARY, list(range(VOCABULARY)))
    return logprobs, replace(rows, behaviour=behaviour, teacher=teacher, proximal=logprobs.detach())


def true_gradient(logits: Tensor, teacher: Tensor) -> Tensor:
    at = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(at, -1)
    (logprobs.exp() * (logprobs - teacher)).sum().backward()
    assert at.grad is not None
    return at.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_both_forms_have_the_gradient_of_the_kl_to_the_teacher(place: str, seed: int) -> None:
    logits, behaviour, teacher = policies(seed)
    at = logits.clone().requires_grad_()
    logprobs, rows = every_token(at, behaviour, teacher)
    if place == "loss":
        losses = distillation_loss(logprobs, rows, 2.0)
    else:
        rows = replace(rows, advantages=distilled_advantages(rows.proximal, rows, 2.0, 0.0))
        weight = (rows.proximal - behaviour).exp()  # the correction, without a cap
        losses = weight * loss("ppo")(logprobs, rows)
    (behaviour.exp() * losses).sum().backward()
    torch.testing.assert_close(at.grad, 2.0 * true_gradient(logits, teacher), rtol=1e-12, atol=1e-12)


def test_engines_logprobs_for_the_policys_would_be_biased() -> None:
    """The difference x must be measured with the policy: with mu, even the weighted gradient is wrong."""
    logits, behaviour, teacher = policies(0)
    at = logits.clone().requires_grad_()
    logprobs, rows = every_token(at, behaviour, teacher)
    advantages = distilled_advantages(behaviour, rows, 1.0, 0.0)
    (behaviour.exp() * (logprobs - behaviour).exp() * -advantages).sum().backward()
    assert at.grad is not None
    assert float((at.grad - true_gradient(logits, teacher)).abs().max()) > 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_other_temperature_needs_the_teacher_at_1_alone(place: str, temperature: float) -> None:
    logits, behaviour, teacher = policies(2)
    at = logits.clone().requires_grad_()
    logprobs, rows = every_token(at / temperature, behaviour, teacher)
    start, plain = logprobs.detach(), torch.log_softmax(logits, -1)
    rows = replace(rows, teacher=tempered(start, plain, teacher, temperature))
    if place == "loss":
        losses = distillation_loss(logprobs, rows, 1.0)
    else:
        rows = replace(rows, advantages=distilled_advantages(start, rows, 1.0, 0.0))
        losses = (start - behaviour).exp() * loss("ppo")(logprobs, rows)
    (behaviour.exp() * losses).sum().backward()
    expected = true_gradient(logits / temperature, torch.log_softmax(teacher / temperature, -1)) / temperature
    torch.testing.assert_close(at.grad, expected, rtol=1e-12, atol=1e-12)
    itself = tempered(start, plain, plain, temperature)
    assert float((start - itself).abs().max()) < 1e-15


def test_loss_is_the_kl_and_least_at_the_teacher() -> None:
    logits, behaviour, teacher = policies(1)
    logprobs, rows = every_token(logits, behaviour, teacher)
    kl = float((behaviour.exp() * distillation_loss(logprobs, rows, 1.0)).sum())
    assert kl == pytest.approx(float((logprobs.exp() * (logprobs - teacher)).sum()), rel=1e-12)
    assert kl > 0
    same, rows = every_token(teacher, behaviour, teacher)
    assert float(distillation_loss(same, rows, 1.0).abs().max()) < 1e-15
    assert math.isclose(float(same.exp().sum()), 1.0)


def test_chain_links_what_has_one_owner() -> None:
    before = chain(torch.tensor([0, 0, 0, 2, 2, 5]))
    assert before.tolist() == [-1, 0, 1, -1, 3, -1]
    assert accumulated(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), before, 0.5).tolist() == [
        *(3.0, 4.0, 4.0),
        *(16.0, 16.0, 32.0),
    ]
