"""Masks of tokens and sequences whose mismatch between engine and trainer is too large (algo.mask). A new one is one
function and a row of MASKS. They have no gradient, and combine with each other and with a correction (correction.py). A
masked token has no gradient, and the weights of the others do not grow: loss denominators are those before masking.

Of torch this module only calls methods of tensors (algo/registry.py says why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.algo.correction import log_rho, of_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import LossRows

Mask = Callable[..., "Tensor"]
"""Maps (log pi without gradient [T], rows of whole sequences, value of the setting) to [T] bool, True for tokens to
train."""


def sequence_mask(logprobs: Tensor, rows: LossRows, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose product of rho is within the bounds (verl's seq_sum_k1: its k1 is -log rho, so its bounds
    apply to 1 / rho)."""
    return _within(of_sequence(rows), bounds)


def geometric_mask(logprobs: Tensor, rows: LossRows, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose geometric mean of rho is within the bounds (NeMo-RL's seq-mask-tis; verl's seq_mean_k1, with
    bounds on 1 / rho). 0.999 and 1.002 are common."""
    return _within(_mean(log_rho(rows), rows), bounds)


def opsm_mask(logprobs: Tensor, rows: LossRows, threshold: float) -> Tensor:
    """Drop sequences with A < 0 that have become unlikely: mean of (l_mu - l) above the threshold. Off-policy sequence
    masking, DeepSeek-V3.2 (arXiv 2512.02556), comparing the policy in training with what the engine reported (TRL's
    get_off_policy_mask; slime's measures from the proximal policy)."""
    return ~((rows.advantages < 0) & (_mean(rows.behaviour - logprobs, rows) > threshold))


def lag_mask(logprobs: Tensor, rows: LossRows, most: int) -> Tensor:
    """Keep tokens that are at most `most` versions old."""
    return rows.lag <= most


MASKS: dict[str, Mask] = {
    "sequence": sequence_mask,
    "geometric": geometric_mask,
    "opsm": opsm_mask,
    "lag": lag_mask,
}
"""Masks by the setting of `algo.mask` that enables each."""


def masked(factor: Tensor, logprobs: Tensor, rows: LossRows, settings: Mapping[str, Any]) -> Tensor:
    """Return the factor of each token's loss, [T], with 0 where a mask applies. `settings` holds the value of each
    mask; None disables it."""
    for name, mask in MASKS.items():
        if settings.get(name) is not None:
            factor = factor.where(mask(logprobs.detach(), rows, settings[name]), 0.0)
    return factor


def _mean(values: Tensor, rows: LossRows) -> Tensor:
    """Return the mean over each token's sequence, [T]."""
    return (rows.sum_per_sample(values) / rows.lengths().clamp(min=1))[rows.sample]


def _within(log_value: Tensor, bounds: tuple[float, float]) -> Tensor:
    value = log_value.exp()
    return (value >= bounds[0]) & (value <= bounds[1])
