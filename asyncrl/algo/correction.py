"""Corrections for the mismatch between engine and trainer: importance weights of trained tokens. A new one is one
function. Corrections have no gradient. Loss denominators are those before any rejection: a token with weight 0 has no
gradient, and the weights of the others do not grow.

    rho = pi_p / mu    the proximal policy, from which the batch's steps start, over what the engine reported

At most one weight is applied (two would count the same mismatch twice); masks (masks.py) combine. Sequences are
samples, as in the losses. Of torch this module only calls methods of tensors (algo/registry.py says why).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algo.loss import MAX_LOG_RATIO
from asyncrl.algo.registry import AlgorithmRegistry
from asyncrl.settings import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import LossRows, TokenTable

CORRECTIONS: AlgorithmRegistry[None] = AlgorithmRegistry("algo.correction", None)
"""Importance weights map rows of whole sequences and their settings to weights [T]."""


# -- weights ----------------------------------------------------------------------------------------------------


@CORRECTIONS.register()
def tis(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return min(max(rho, floor), cap) of each token: truncated importance sampling (Yao et al.
    2025; slime's vanilla_tis_function, NeMo-RL's tis, verl's rollout_is=token)."""
    return log_rho(rows).exp().clamp(floor, cap)


@CORRECTIONS.register()
def tis_sequence(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return the truncated weight of the product of rho over the sequence (verl, rollout_corr_helper,
    rollout_is=sequence). It depends on the length: for long answers it is almost always the floor or the cap."""
    return of_sequence(rows).exp().clamp(floor, cap)


@CORRECTIONS.register()
def icepop(rows: LossRows, *, cap: Positive = 2.0, floor: NonNegative = 0.0) -> Tensor:
    """Return rho if floor <= rho <= cap and 0 otherwise: IcePop (Ling team 2025; slime's icepop_function, NeMo-RL)."""
    rho = log_rho(rows).exp()
    return rho.where((rho >= floor) & (rho <= cap), 0.0)


# -- the proximal policy ----------------------------------------------------------------------------------------


def log_linear_proximal(logprobs: Tensor, rows: TokenTable) -> Tensor:
    """Return l_mu + a (l - l_mu), with a = (lag - 1) / lag, and a = 0 for tokens of the newest two versions: the
    proximal policy without an extra forward pass (A-3PO, arXiv 2512.06547; AReaL's
    compute_prox_logp_approximations)."""
    lag = rows.lag.to(rows.behaviour.dtype)
    share = ((lag - 1.0) / lag.clamp(min=1.0)).where(lag > 0, 0.0).clamp(0.0, 1.0)
    return rows.behaviour + share * (logprobs.detach() - rows.behaviour)


# -- parts ------------------------------------------------------------------------------------------------------


def log_rho(rows: LossRows) -> Tensor:
    """Return log rho of each token, [T]."""
    return (rows.proximal - rows.behaviour).clamp(max=MAX_LOG_RATIO)


def of_sequence(rows: LossRows) -> Tensor:
    """Return the sum of log rho over each token's sequence, [T]."""
    return rows.sum_per_sample(rows.proximal - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]
