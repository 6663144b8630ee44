"""What a critic is trained by, and how good it is."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """[T] max((V - G)^2, (clip(V, V_before - c, V_before + c) - G)^2) / 2: PPO2's clipped value loss (OpenAI baselines,
    ppo2/model.py; verl, core_algos.compute_value_loss). Without a clip (V - G)^2 / 2."""
    error = (values - returns) ** 2
    if clip is not None:
        near = torch.minimum(torch.maximum(values, before - clip), before + clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(G - V) / Var(G): 1 when values are right, 0 when a constant would do as well, negative when it would do
    better; 0 where returns do not vary."""
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())
