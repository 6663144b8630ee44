"""Policy losses per token, to be minimised. Notation (ALL in log space unless said otherwise, shape [T]):

    logprobs    l = log pi(token), the policy in training, with gradient
    proximal    l_p, the policy that the step started from, no gradient
    behaviour   l_mu, what the engine reported when it wrote the token
    advantage   A

With one optimizer step per batch the proximal policy is the current one, so r = exp(l - l_p) = 1 and no extra forward
pass is needed; the engine-trainer weight rho = exp(l_p - l_mu) carries staleness and numerical mismatch together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossParams:
    """The numbers that losses take."""

    clip_low: float
    clip_high: float
    correction_cap: float


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, LossParams], Tensor]


def decoupled_ppo(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor, params: LossParams
) -> Tensor:
    """-min(rho, cap) * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5), with clip-higher (DAPO,
    arXiv 2503.14476) and the correction truncated as in TIS.
    """
    ratio = torch.exp(logprobs - proximal)
    clipped = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    return -_correction(proximal, behaviour, params) * torch.minimum(ratio * advantage, clipped * advantage)


def tis(logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor, params: LossParams) -> Tensor:
    """-min(rho, cap) * A * l: policy gradient with truncated importance sampling (Yao et al. 2025)."""
    return -_correction(proximal, behaviour, params) * advantage * logprobs


def _correction(proximal: Tensor, behaviour: Tensor, params: LossParams) -> Tensor:
    return torch.exp(proximal - behaviour).clamp(max=params.correction_cap)


LOSSES: dict[str, Loss] = {"decoupled_ppo": decoupled_ppo, "tis": tis}
