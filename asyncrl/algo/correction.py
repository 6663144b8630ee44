"""Corrections for the gap between engine and trainer: weights, and masks, of trained tokens. Adding one is one function
and one row. They have no gradient, and denominators stay those before any rejection: a masked token has no gradient,
and the others do not grow for it.

    rho = pi_p / mu    the policy that the batch's steps start from, against what the engine reported

One weight is applied at most (two would count the same gap twice); masks combine. Sequences are samples, as in the
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
    """Which corrections are on (those that are set), and their numbers."""

    correction: str | None = "tis"  # one of WEIGHTS
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    mask_sequence: tuple[float, float] | None = None
    mask_geometric: tuple[float, float] | None = None
    mask_opsm: float | None = None  # nats per token
    mask_lag: int | None = None  # versions


Correction = Callable[[TokenTable, CorrectionParams], Tensor]
"""Rows of whole sequences -> weights [T]."""

Mask = Callable[[Tensor, TokenTable, Any], Tensor]
"""(log pi without gradient [T], rows of whole sequences, the setting's value) -> [T] bool, True where it is trained."""


# -- weights ----------------------------------------------------------------------------------------------------


def tis(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """min(max(rho, correction_floor), correction_cap) of each token: truncated importance sampling (Yao et al. 2025;
    slime's vanilla_tis_function, NeMo-RL's tis, verl's rollout_is=token)."""
    return _log_rho(rows).exp().clamp(params.correction_floor, params.correction_cap)


def tis_sequence(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """The same of the product of rho over the sequence (verl, rollout_corr_helper, rollout_is=sequence). It depends on
    the length: with long answers it is 0 or the cap."""
    return _of_sequence(rows).exp().clamp(params.correction_floor, params.correction_cap)


def icepop(rows: TokenTable, params: CorrectionParams) -> Tensor:
    """rho where floor <= rho <= cap, 0 elsewhere: IcePop (Ling team 2025; slime's icepop_function, NeMo-RL)."""
    rho = _log_rho(rows).exp()
    return torch.where((rho >= params.correction_floor) & (rho <= params.correction_cap), rho, 0.0)


WEIGHTS: dict[str, Correction] = {"tis": tis, "tis_sequence": tis_sequence, "icepop": icepop}


# -- masks ------------------------------------------------------------------------------------------------------


def mask_sequence(logprobs: Tensor, rows: TokenTable, bounds: tuple[float, float]) -> Tensor:
    """Sequences whose product of rho lies within the bounds (verl's seq_sum_k1: its k1 is -log rho, so that its
    bounds are those of 1 / rho)."""
    return _within(_of_sequence(rows), bounds)


def mask_geometric(logprobs: Tensor, rows: TokenTable, bounds: tuple[float, float]) -> Tensor:
    """Sequences whose geometric mean of rho lies within the bounds (NeMo-RL's seq-mask-tis, verl's seq_mean_k1 with
    bounds of 1 / rho); 0.999 and 1.002 are usual."""
    return _within(_mean(_log_rho(rows), rows), bounds)


def mask_opsm(logprobs: Tensor, rows: TokenTable, threshold: float) -> Tensor:
    """Not the sequences with A < 0 that have become unlikely: mean of (l_mu - l) above the threshold. Off-policy
    sequence masking, DeepSeek-V3.2 (arXiv 2512.02556), of the policy in training against what the engine reported
    (TRL's get_off_policy_mask; slime's measures from the proximal policy)."""
    return ~((known(rows.advantages) < 0) & (_mean(rows.behaviour - logprobs, rows) > threshold))


def mask_lag(logprobs: Tensor, rows: TokenTable, most: int) -> Tensor:
    """Tokens that are at most so many versions old."""
    return rows.lag <= most


MASKS: dict[str, Mask] = {
    "mask_sequence": mask_sequence,
    "mask_geometric": mask_geometric,
    "mask_opsm": mask_opsm,
    "mask_lag": mask_lag,
}
"""By the setting that turns each on."""


def correction(logprobs: Tensor, rows: TokenTable, params: CorrectionParams) -> Tensor:
    """What each token's loss is multiplied by, [T], without gradient."""
    factor = WEIGHTS[params.correction](rows, params) if params.correction else torch.ones_like(rows.behaviour)
    for name, mask in MASKS.items():
        if (setting := getattr(params, name)) is not None:
            factor = torch.where(mask(logprobs.detach(), rows, setting), factor, 0.0)
    return factor


# -- the policy that the steps start from -----------------------------------------------------------------------


def log_linear_proximal(logprobs: Tensor, rows: TokenTable) -> Tensor:
    """l_mu + a (l - l_mu), a = (lag - 1) / lag, and 0 for tokens of the newest two versions: the proximal policy
    without a forward pass of its own (A-3PO, arXiv 2512.06547; AReaL's compute_prox_logp_approximations)."""
    lag = rows.lag.to(rows.behaviour.dtype)
    share = torch.where(lag > 0, (lag - 1.0) / lag.clamp(min=1.0), 0.0).clamp(0.0, 1.0)
    return rows.behaviour + share * (logprobs.detach() - rows.behaviour)


# -- parts ------------------------------------------------------------------------------------------------------


def _log_rho(rows: TokenTable) -> Tensor:
    return (known(rows.proximal) - rows.behaviour).clamp(max=MAX_LOG_RATIO)


def _of_sequence(rows: TokenTable) -> Tensor:
    """Sum of log rho over each token's sequence, [T]."""
    return rows.sum_per_sample(known(rows.proximal) - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]


def _mean(values: Tensor, rows: TokenTable) -> Tensor:
    """Mean over each token's sequence, [T]."""
    return (rows.sum_per_sample(values) / rows.lengths().clamp(min=1))[rows.sample]


def _within(log_value: Tensor, bounds: tuple[float, float]) -> Tensor:
    value = log_value.exp()
    return (value >= bounds[0]) & (value <= bounds[1])
