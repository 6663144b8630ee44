"""The critic's loss, and a measure of its quality."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return max((V - G)^2, (clip(V, V_before - c, V_before + c) - G)^2) / 2, [T]: PPO2's clipped value loss (OpenAI
    baselines, ppo2/model.py; verl, core_algos.compute_value_loss). Without a clip it is (V - G)^2 / 2."""
    error = (values - returns) ** 2
    if clip is not None:
        near = torch.minimum(torch.maximum(values, before - clip), before + clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(G - V) / Var(G): 1 if the values are right, 0 if a constant would do as well, negative if it would
    do better; 0 if the returns do not vary."""
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())
