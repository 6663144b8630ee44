"""Estimators of KL(pi || reference) per token, of x = log pi - log reference at tokens that pi wrote (Schulman,
"Approximating KL divergence", 2020).

What they are good for as a loss (tests/algo/test_kl.py shows it): over tokens of pi itself, the gradient of k1 is zero
in expectation, that of k2 is the gradient of the KL, that of k3 is the gradient of KL(reference || pi), and that of
`ratio`, k3 times pi / mu with gradient through both, is the gradient of the KL again, also over tokens of an older mu
(DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algo.loss import MAX_LOG_RATIO

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log pi, log reference, log mu) -> [T]."""


def k1(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """x: unbiased, of high variance, and negative at times."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """x^2 / 2."""
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """e^-x - 1 + x: unbiased and never negative."""
    x = logprobs - reference
    return torch.exp((-x).clamp(max=MAX_LOG_RATIO)) - 1 + x


def ratio(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """k3 weighed by pi / mu."""
    return torch.exp((logprobs - behaviour).clamp(max=MAX_LOG_RATIO)) * k3(logprobs, reference, behaviour)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "ratio": ratio}
