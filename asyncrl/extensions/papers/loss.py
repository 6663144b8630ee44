"""Losses of single papers, in the terms of algo/loss.py: first those relative to the proximal policy, then those
relative to the behaviour policy. Of torch this module only calls methods of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algo.loss import LOSSES, MAX_LOG_RATIO, LossTraits, clipped, importance_ratio, sequence_mean
from asyncrl.settings import AboveOne, NonNegative, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import LossRows, TrainingTable

DPPO_MAX_RATIO = 20.0


@LOSSES.register(LossTraits(per_sequence=True))
def gspo_token(
    logprobs: Tensor,
    rows: LossRows,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegative = 4e-4,
    dual_clip: AboveOne | None = None,
) -> Tensor:
    """Return GSPO's value with the gradient through each token's own probability: GSPO-token, arXiv 2507.18071, section
    4.3."""
    log_ratio = sequence_mean(logprobs.detach() - rows.proximal, rows)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()[rows.sample] * (logprobs - logprobs.detach()).exp()
    return clipped(ratio, rows, clip_low, clip_high, dual_clip)


@LOSSES.register()
def sapo(logprobs: Tensor, rows: LossRows, *, up: Positive = 1.0, down: Positive = 1.05) -> Tensor:
    """Return -4/t sigmoid(t (r - 1)) A, a soft gate with a temperature t for each sign of A: SAPO, arXiv 2511.20347."""
    ratio = importance_ratio(logprobs, rows.proximal)
    return -_gate(ratio, up).where(rows.advantages > 0, _gate(ratio, down)) * rows.advantages


def _gate(ratio: Tensor, temperature: float) -> Tensor:
    return 4.0 / temperature * (temperature * (ratio - 1.0)).sigmoid()


@LOSSES.register()
def minirl(logprobs: Tensor, rows: LossRows, *, clip_low: Share = 0.2, clip_high: NonNegative = 0.28) -> Tensor:
    """Return -r A l, but zero for the tokens that PPO's clip would give no gradient: MiniRL, arXiv 2512.01374. (Its
    weight pi/mu is r rho: use it with a token correction.)"""
    ratio = importance_ratio(logprobs, rows.proximal).detach()
    gone = (ratio > 1.0 + clip_high).where(rows.advantages > 0, ratio < 1.0 - clip_low)
    return (-ratio * rows.advantages * logprobs).masked_fill(gone, 0.0)


@LOSSES.register(LossTraits(corrects=True))
def dppo_tv(logprobs: Tensor, rows: LossRows, *, trust: Positive = 0.2) -> Tensor:
    """Return -min(w, 20) A l, with no gradient through the weight, for tokens whose probability has not yet moved by
    more than `trust` in the direction of A, and zero otherwise: DPPO with binary total variation, arXiv 2602.04879
    (verl's dppo_tv, which also bounds the weight by 20)."""
    ratio = importance_ratio(logprobs, rows.behaviour).detach()
    moved = logprobs.detach().exp() - rows.behaviour.exp()
    gone = (moved > trust).where(rows.advantages > 0, moved < -trust)
    return (-ratio.clamp(max=DPPO_MAX_RATIO) * rows.advantages * logprobs).masked_fill(gone, 0.0)


@LOSSES.register(LossTraits(corrects=True))
def topr(logprobs: Tensor, rows: LossRows) -> Tensor:
    """Return -A l for A > 0 and -min(W, 1) A l otherwise, with W the product of w over the sequence: tapered off-policy
    REINFORCE, arXiv 2503.14286, which weights by the whole answer (ROLL and Trinity weight by each token)."""
    log_weight = rows.sum_per_sample(logprobs.detach() - rows.behaviour)[rows.sample]
    weight = log_weight.clamp(max=0.0).exp().masked_fill(rows.advantages > 0, 1.0)
    return -weight * rows.advantages * logprobs


@LOSSES.register(LossTraits(corrects=True))
def vespo(logprobs: Tensor, rows: LossRows) -> Tensor:
    """Return -e^L W^k e^(-L W) A l, with W the product of w over the sequence and (k, L) = (2, 3) for A >= 0, (3, 2)
    otherwise. The weight is 1 at W = 1 and has no gradient: VESPO, arXiv 2602.10693 (the parameters are TRL's)."""
    log_ratio = rows.sum_per_sample(logprobs.detach() - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]
    good = (rows.advantages >= 0).to(log_ratio.dtype)
    k, scale = 3.0 - good, 2.0 + good
    weight = (scale + k * log_ratio - scale * log_ratio.exp()).exp()
    return -weight * rows.advantages * logprobs


def least_deviating(table: TrainingTable, *, threshold: Positive = 0.04) -> Tensor:
    """Return `keep` [N] without the tokens with the largest (log pi_p / mu)^2, as few as are needed for the mean of the
    others to be at most `threshold`: M2PO, arXiv 2510.01161, whose value for every model is 0.04.

    Only tokens that have moved in the direction of their advantage (A > 0 and pi_p > mu, or A < 0 and pi_p < mu) are
    counted and can be left out, as in PPO's clip and in the paper's own code (Infini-AI-Lab/M2PO,
    kpo_clip_harmful_tokens, which turns the threshold into clip bounds in every micro-batch); AReaL counts all tokens.
    Tokens with the same value as one that is left out are left out, too."""
    log_ratio = table.column("proximal") - table.behaviour
    outward = table.keep & (log_ratio * table.advantages > 0)
    squares = log_ratio**2
    ascending = squares[outward].sort().values
    means = ascending.cumsum(0) / ascending.new_ones(len(ascending)).cumsum(0)
    within = int((means <= threshold).sum())
    if within == len(ascending):
        return table.keep
    return table.keep & (~outward | (squares < ascending[within]))


@LOSSES.register(LossTraits(corrects=True, selection=least_deviating))
def m2po(logprobs: Tensor, rows: LossRows) -> Tensor:
    """Return -w A, with no other bound than its token selection (least_deviating): M2PO, arXiv 2510.01161."""
    return -importance_ratio(logprobs, rows.behaviour) * rows.advantages
