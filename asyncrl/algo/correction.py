"""Corrections for the mismatch between engine and trainer: importance weights and masks of trained tokens. A new one is
one function and one row of WEIGHTS or MASKS. Corrections have no gradient. Loss denominators are those before any
rejection: a masked token has no gradient, and the weights of the others do not grow.

    rho = pi_p / mu    the proximal policy, from which the batch's steps start, over what the engine reported

At most one weight is applied (two would count the same mismatch twice); masks combine. Sequences are samples, as in the
losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algo.loss import MAX_LOG_RATIO
from asyncrl.algo.table import TokenTable, known


@dataclass(frozen=True)
class CorrectionParams:
    """Enabled corrections (those that are not None) and their parameters."""

    correction: str | None = "tis"  # one of WEIGHTS
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    mask_sequence: tuple[float, float] | None = None
    mask_geometric: tuple[float, float] | None = None
    mask_opsm: float | None = None  # nats per token
    mask_lag: int | None = None  # versions


Correction = Callable[[TokenTable, CorrectionParams], Tensor]
"""Maps rows of whole sequences to weights [T]."""

Mask = Callable[[Tensor, TokenTable, Any], Tensor]
"""Maps (log pi without gradient [T], rows of whole sequences, value of the setting) to [T] bool, True for tokens to
train."""


# -- weights ----------------------------------------------------------------------------------------------------


def tis(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """Return min(max(rho, correction_floor), correction_cap) of each token: truncated importance sampling (Yao et al.
    2025; slime's vanilla_tis_function, NeMo-RL's tis, verl's rollout_is=token)."""
    return _log_rho(rows).exp().clamp(params.correction_floor, params.correction_cap)


def tis_sequence(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """Return the truncated weight of the product of rho over the sequence (verl, rollout_corr_helper,
    rollout_is=sequence). It depends on the length: for long answers it is almost always the floor or the cap."""
    return _of_sequence(rows).exp().clamp(params.correction_floor, params.correction_cap)


def icepop(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """Return rho if floor <= rho <= cap and 0 otherwise: IcePop (Ling team 2025; slime's icepop_function, NeMo-RL)."""
    rho = _log_rho(rows).exp()
    return torch.where((rho >= params.correction_floor) & (rho <= params.correction_cap), rho, 0.0)


WEIGHTS: dict[str, Correction] = {"tis": tis, "tis_sequence": tis_sequence, "icepop": icepop}


# -- masks ------------------------------------------------------------------------------------------------------


def mask_sequence(logprobs: Tensor, rows: TokenTable, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose product of rho is within the bounds (verl's seq_sum_k1: its k1 is -log rho, so its bounds
    apply to 1 / rho)."""
    return _within(_of_sequence(rows), bounds)


def mask_geometric(logprobs: Tensor, rows: TokenTable, bounds: tuple[float, float]) -> Tensor:
    """Keep sequences whose geometric mean of rho is within the bounds (NeMo-RL's seq-mask-tis; verl's seq_mean_k1, with
    bounds on 1 / rho). 0.999 and 1.002 are common."""
    return _within(_mean(_log_rho(rows), rows), bounds)


def mask_opsm(logprobs: Tensor, rows: TokenTable, threshold: float) -> Tensor:
    """Drop sequences with A < 0 that have become unlikely: mean of (l_mu - l) above the threshold. Off-policy sequence
    masking, DeepSeek-V3.2 (arXiv 2512.02556), comparing the policy in training with what the engine reported (TRL's
    get_off_policy_mask; slime's measures from the proximal policy)."""
    return ~((known(rows.advantages) < 0) & (_mean(rows.behaviour - logprobs, rows) > threshold))


def mask_lag(logprobs: Tensor, rows: TokenTable, most: int) -> Tensor:
    """Keep tokens that are at most `most` versions old."""
    return rows.lag <= most


MASKS: dict[str, Mask] = {
    "mask_sequence": mask_sequence,
    "mask_geometric": mask_geometric,
    "mask_opsm": mask_opsm,
    "mask_lag": mask_lag,
}
"""Masks by the setting that enables each."""


def correction(logprobs: Tensor, rows: TokenTable, params: CorrectionParams) -> Tensor:
    """Return the factor of each token's loss, [T], without gradient."""
    factor = WEIGHTS[params.correction](rows, params) if params.correction else torch.ones_like(rows.behaviour)
    for name, mask in MASKS.items():
        if (setting := getattr(params, name)) is not None:
            factor = torch.where(mask(logprobs.detach(), rows, setting), factor, 0.0)
    return factor


# -- the proximal policy ----------------------------------------------------------------------------------------


def log_linear_proximal(logprobs: Tensor, rows: TokenTable) -> Tensor:
    """Return l_mu + a (l - l_mu), with a = (lag - 1) / lag, and a = 0 for tokens of the newest two versions: the
    proximal policy without an extra forward pass (A-3PO, arXiv 2512.06547; AReaL's
    compute_prox_logp_approximations)."""
    lag = rows.lag.to(rows.behaviour.dtype)
    share = torch.where(lag > 0, (lag - 1.0) / lag.clamp(min=1.0), 0.0).clamp(0.0, 1.0)
    return rows.behaviour + share * (logprobs.detach() - rows.behaviour)


# -- parts ------------------------------------------------------------------------------------------------------


def _log_rho(rows: TokenTable) -> Tensor:
    return (known(rows.proximal) - rows.behaviour).clamp(max=MAX_LOG_RATIO)


def _of_sequence(rows: TokenTable) -> Tensor:
    """Return the sum of log rho over each token's sequence, [T]."""
    return rows.sum_per_sample(known(rows.proximal) - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]


def _mean(values: Tensor, rows: TokenTable) -> Tensor:
    """Return the mean over each token's sequence, [T]."""
    return (rows.sum_per_sample(values) / rows.lengths().clamp(min=1))[rows.sample]


def _within(log_value: Tensor, bounds: tuple[float, float]) -> Tensor:
    value = log_value.exp()
    return (value >= bounds[0]) & (value <= bounds[1])
