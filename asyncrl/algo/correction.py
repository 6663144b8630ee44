"""Corrections for the mismatch between engine and trainer: importance weights and masks of trained tokens. A new one is
one function; a new mask also needs a row of MASKS. Corrections have no gradient. Loss denominators are those before any
rejection: a masked token has no gradient, and the weights of the others do not grow.

    rho = pi_p / mu    the proximal policy, from which the batch's steps start, over what the engine reported

At most one weight is applied (two would count the same mismatch twice); masks combine. Sequences are samples, as in the
losses. Of torch this module only calls methods of tensors (algo/registry.py says why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.algo.loss import MAX_LOG_RATIO
from asyncrl.algo.registry import AlgorithmRegistry
from asyncrl.settings import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import LossRows, TokenTable

CORRECTIONS: AlgorithmRegistry[None] = AlgorithmRegistry("algo.correction", None)
"""Importance weights map rows of whole sequences and their settings to weights [T]."""

Mask = Callable[..., "Tensor"]
"""Maps (log pi without gradient [T], rows of whole sequences, value of the setting) to [T] bool, True for tokens to
train."""


# -- weights ----------------------------------------------------------------------------------------------------


@CORRECTIONS.register()
def tis(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return min(max(rho, floor), cap) of each token: truncated importance sampling (Yao et al.
    2025; slime's vanilla_tis_function, NeMo-RL's tis, verl's rollout_is=token)."""
    return _log_rho(rows).exp().clamp(floor, cap)


@CORRECTIONS.register()
def tis_sequence(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return the truncated weight of the product of rho over the sequence (verl, rollout_corr_helper,
    rollout_is=sequence). It depends on the length: for long answers it is almost always the floor or the cap."""
    return _of_sequence(rows).exp().clamp(floor, cap)


@CORRECTIONS.register()
def icepop(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return rho if floor <= rho <= cap and 0 otherwise: IcePop (Ling team 2025; slime's icepop_function, NeMo-RL)."""
    rho = _log_rho(rows).exp()
    return rho.where((rho >= floor) & (rho <= cap), 0.0)


# -- masks ------------------------------------------------------------------------------------------------------


def sequence_mask(logprobs: Tensor, rows: LossRows, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose product of rho is within the bounds (verl's seq_sum_k1: its k1 is -log rho, so its bounds
    apply to 1 / rho)."""
    return _within(_of_sequence(rows), bounds)


def geometric_mask(logprobs: Tensor, rows: LossRows, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose geometric mean of rho is within the bounds (NeMo-RL's seq-mask-tis; verl's seq_mean_k1, with
    bounds on 1 / rho). 0.999 and 1.002 are common."""
    return _within(_mean(_log_rho(rows), rows), bounds)


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
        if settings[name] is not None:
            factor = factor.where(mask(logprobs.detach(), rows, settings[name]), 0.0)
    return factor


# -- the proximal policy ----------------------------------------------------------------------------------------


def log_linear_proximal(logprobs: Tensor, rows: TokenTable) -> Tensor:
    """Return l_mu + a (l - l_mu), with a = (lag - 1) / lag, and a = 0 for tokens of the newest two versions: the
    proximal policy without an extra forward pass (A-3PO, arXiv 2512.06547; AReaL's
    compute_prox_logp_approximations)."""
    lag = rows.lag.to(rows.behaviour.dtype)
    share = ((lag - 1.0) / lag.clamp(min=1.0)).where(lag > 0, 0.0).clamp(0.0, 1.0)
    return rows.behaviour + share * (logprobs.detach() - rows.behaviour)


# -- parts ------------------------------------------------------------------------------------------------------


def _log_rho(rows: LossRows) -> Tensor:
    return (rows.proximal - rows.behaviour).clamp(max=MAX_LOG_RATIO)


def _of_sequence(rows: LossRows) -> Tensor:
    """Return the sum of log rho over each token's sequence, [T]."""
    return rows.sum_per_sample(rows.proximal - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]


def _mean(values: Tensor, rows: LossRows) -> Tensor:
    """Return the mean over each token's sequence, [T]."""
    return (rows.sum_per_sample(values) / rows.lengths().clamp(min=1))[rows.sample]


def _within(log_value: Tensor, bounds: tuple[float, float]) -> Tensor:
    value = log_value.exp()
    return (value >= bounds[0]) & (value <= bounds[1])
