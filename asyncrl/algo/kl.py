"""Estimators of KL(pi || reference) per token, from x = log pi - log reference at tokens that pi wrote (Schulman,
"Approximating KL divergence", 2020).

Their expected gradients as a loss (shown in tests/algo/test_kl.py): over tokens of pi itself, that of k1 is zero, that
of k2 is the gradient of the KL, and that of k3 is the gradient of KL(reference || pi). That of `ratio`, which is k3
times pi / mu with gradient through both, is again the gradient of the KL, even over tokens of an older mu
(DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algo.loss import MAX_LOG_RATIO

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (log pi, log reference, log mu) to [T]."""


def k1(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return x: unbiased, but of high variance and sometimes negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return x^2 / 2."""
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return e^-x - 1 + x: unbiased and never negative."""
    x = logprobs - reference
    return torch.exp((-x).clamp(max=MAX_LOG_RATIO)) - 1 + x


def ratio(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """Return k3 weighted by pi / mu."""
    return torch.exp((logprobs - behaviour).clamp(max=MAX_LOG_RATIO)) * k3(logprobs, reference, behaviour)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "ratio": ratio}
