"""Losses against numbers worked out by hand, and their gradients at the policy that the step started from."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algo.loss import LOSSES, LossParams, decoupled_ppo, tis

PARAMS = LossParams(clip_low=0.2, clip_high=0.3, correction_cap=2.0)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64)


def test_decoupled_ppo_by_hand() -> None:
    # ratios 1, 2 (above 1.3), 2, 0.5 (below 0.8), 0.5, 1.1 (inside); corrections 1 but for the last, 0.5
    proximal = logs(0.2, 0.2, 0.2, 0.2, 0.2, 0.2)
    logprobs = logs(0.2, 0.4, 0.4, 0.1, 0.1, 0.22)
    behaviour = logs(0.2, 0.2, 0.2, 0.2, 0.2, 0.4)
    advantage = torch.tensor([3.0, 1.0, -1.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    found = decoupled_ppo(logprobs, proximal, behaviour, advantage, PARAMS)
    expected = [-3.0, -1.3, 2.0, -0.5, 0.8, -0.5 * 2.2]
    assert found.tolist() == pytest.approx(expected)


def test_tis_by_hand() -> None:
    proximal, behaviour = logs(0.2, 0.4, 0.9), logs(0.4, 0.4, 0.1)  # corrections 0.5, 1, 9 -> 2
    found = tis(logs(0.5, 0.5, 0.5), proximal, behaviour, torch.tensor([1.0, -2.0, 1.0]), PARAMS)
    assert found.tolist() == pytest.approx([0.5 * math.log(2), -2 * math.log(2), 2 * math.log(2)])


def gradient(name: str, params: LossParams = PARAMS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient at l = l_p, with the correction and the advantage it should be the product of."""
    generator = torch.Generator().manual_seed(3)
    at = torch.randn(200, dtype=torch.float64, generator=generator) - 2
    behaviour = at + torch.randn(200, dtype=torch.float64, generator=generator)
    advantage = torch.randn(200, dtype=torch.float64, generator=generator)
    logprobs = at.clone().requires_grad_()
    LOSSES[name](logprobs, at, behaviour, advantage, params).sum().backward()
    assert logprobs.grad is not None
    weight = torch.exp(at - behaviour)
    assert bool((weight > params.correction_cap).any())
    return logprobs.grad, weight.clamp(max=params.correction_cap), advantage


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_gradient_at_the_start_is_policy_gradient_times_the_capped_weight(name: str, clip: float) -> None:
    found, weight, advantage = gradient(name, LossParams(clip, clip, 2.0))
    torch.testing.assert_close(found, -weight * advantage, rtol=1e-12, atol=1e-12)


def test_all_losses_have_one_gradient_at_the_start() -> None:
    torch.testing.assert_close(gradient("tis")[0], gradient("decoupled_ppo")[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, 1.0), (0.5, -1.0)])
def test_step_that_has_gone_far_enough_has_no_gradient(ratio: float, advantage: float) -> None:
    proximal = logs(0.2)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    decoupled_ppo(logprobs, proximal, proximal, torch.tensor([advantage]), PARAMS).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, -1.0), (0.5, 1.0)])
def test_step_in_the_wrong_direction_is_never_clipped(ratio: float, advantage: float) -> None:
    proximal = logs(0.2)
    logprobs = (proximal + math.log(ratio)).requires_grad_()
    decoupled_ppo(logprobs, proximal, proximal, torch.tensor([advantage]), PARAMS).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage)
