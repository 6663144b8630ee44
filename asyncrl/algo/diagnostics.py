"""Statistics of a batch's log-probabilities: the mismatch between engine and trainer, and the tokens that the loss left
out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.algo.table import LossRows

MAX_LAG = 8


def gap_figures(table: LossRows, seen: Tensor) -> dict[str, float]:
    """Compute mismatch statistics of the tokens that the model ran (`seen`, [N] bool), in nats.

    logprob_gap/kl is the k3 estimate of KL(engine || trainer). correction/ess is the effective sample size of the
    weights pi / mu, as a fraction (Kong 1992). logprob_gap/lag<k> is the mean gap of tokens that are k versions old (k
    or more for the last).
    """
    gap = (table.proximal - table.behaviour)[seen]
    if not len(gap):
        names = ("mean", "max", "p99", "kl")
        return {**{f"logprob_gap/{name}": 0.0 for name in names}, "correction/ess": 1.0}
    size, weight = gap.abs(), gap.clamp(max=40.0).exp()
    figures = {
        "logprob_gap/mean": float(size.mean()),
        "logprob_gap/max": float(size.max()),
        "logprob_gap/p99": float(size.kthvalue(math.ceil(0.99 * len(size))).values),
        "logprob_gap/kl": float((weight - 1 - gap).mean()),
        "correction/ess": float(weight.sum() ** 2 / (weight.square().sum() * len(weight))),
    }
    lag = table.lag[seen].clamp(max=MAX_LAG)
    return figures | {f"logprob_gap/lag{k}": float(size[lag == k].mean()) for k in torch.unique(lag).tolist()}


def loss_figures(
    table: LossRows, logprobs: Tensor, factor: Tensor, seen: Tensor, *, cap: float, clip: tuple[float, float]
) -> dict[str, float]:
    """Compute fractions of the tokens that the model ran: those with a weight pi_p / mu above `cap`, those with a
    correction of zero, and those whose ratio pi / pi_p has left `clip` (low, high) in the direction of their
    advantage."""
    if not bool(seen.any()):
        return dict.fromkeys(("correction/capped", "correction/masked", "loss/clipped"), 0.0)
    rho = (table.proximal - table.behaviour)[seen]
    ratio = (logprobs - table.proximal)[seen].exp()
    advantage = table.advantages[seen]
    clipped = ((advantage > 0) & (ratio > 1 + clip[1])) | ((advantage < 0) & (ratio < 1 - clip[0]))
    return {
        "correction/capped": _share(rho > math.log(cap)),
        "correction/masked": _share(factor[seen] == 0),
        "loss/clipped": _share(clipped),
    }


def _share(chosen: Tensor) -> float:
    return float(chosen.double().mean())


def step_figures(norms: list[float], bad: int, lr: float, groups: int) -> dict[str, float]:
    """Return the statistics of a batch's optimizer steps: `norms` are their gradient norms after a zero, `bad` is the
    number of bad ones, and `groups` that of groups with a gradient."""
    return {
        "groups/trained": float(groups),
        "lr": lr,
        "grad_norm": max(norms),
        "steps/optimizer": float(len(norms) - 1 - bad),
        "step/skipped": float(len(norms) - 1 == bad),
        "step/bad": float(bad > 0),
    }
