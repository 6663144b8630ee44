"""The critic's loss by hand, and the model that it refuses."""

from __future__ import annotations

import pytest
import torch

from asyncrl.extensions.critic.extension import CriticExtension
from asyncrl.extensions.critic.value import explained_variance, value_loss
from tests.fakes import tiny_config


def test_clipped_value_loss_by_hand() -> None:
    before = torch.zeros(4)
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 0.0, 1.0])
    # inside the clip; cut at 0.2, whose error .8 is the larger; away from the return: its own error .5 is the larger
    losses = value_loss(values, before, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 0.25 / 2, 2.25 / 2])
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 0.5, -1.5])  # where the cut one counts, none is left


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    assert value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), None).tolist() == [2.0]


def test_explained_variance_is_one_if_right_zero_if_constant() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) < 0
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_a_critic_does_not_read_images_with_a_tower_of_its_own() -> None:
    pytest.importorskip("asyncrl.extensions.vision")
    config = tiny_config(**{"critic.path": "/other"})
    launch = CriticExtension((config.model_extra or {})["critic"]).launch()
    (refused,) = launch.check_model(config, {"architectures": ["Qwen3VLForConditionalGeneration"]}, 0)
    assert refused.field == "critic.path"
    assert not list(launch.check_model(config, {"architectures": ["Qwen3ForCausalLM"]}, 0))
