"""Policy losses per token, to be minimized. A new loss is one function and one row of LOSSES.

    logprobs     l = log pi(token), the policy in training, with gradient           [T]
    proximal     l_p, the policy that the optimizer steps of this batch start from   [T]
    behaviour    l_mu, what the engine reported when it sampled the token            [T]
    advantages   A                                                                   [T]

    r = pi / pi_p     drift within this batch's own steps: clipping bounds it
    rho = pi_p / mu   engine versus trainer, both staleness and numerics: corrections weight by it (correction.py)
    w = pi / mu       the product of both: losses that use it need no correction, and none may be added

A micro-batch holds whole sequences, so that a sequence-level loss finds all tokens of a sequence. A sequence is a
sample: what was written in one growing context. If an episode has several (a new context, another role, a fork), each
has a ratio of its own, and only the mean over sequences (aggregation) is one over episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable, known

MAX_LOG_RATIO = 80.0  # exp of more than this overflows float32; tighter bounds would cut gradients that PPO keeps
DPPO_MAX_RATIO = 20.0


@dataclass(frozen=True)
class LossParams:
    """Parameters of the losses."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    dppo_trust: float = 0.2  # maximum change of a token's probability
    sapo_up: float = 1.0  # sapo's temperature for A > 0
    sapo_down: float = 1.05  # and otherwise


Loss = Callable[[Tensor, TokenTable, LossParams], Tensor]
"""Maps (logprobs [T], rows of the micro-batch, parameters) to losses [T]."""


# -- relative to the proximal policy -----------------------------------------------------------------------------


def ppo(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): PPO, arXiv 1707.06347, with clip-higher (DAPO, arXiv
    2503.14476). With `dual_clip` c it is at most -A c for A < 0 (arXiv 1912.09729). With a separate correction this is
    decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5)."""
    return _clipped(_ratio(logprobs, known(rows.proximal)), rows, params)


def gspo(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return PPO's loss of s = exp(mean over the sequence of log r), the same for all its tokens: GSPO, arXiv
    2507.18071. Its clip range has another scale (3e-4 and 4e-4, section 5.1)."""
    log_ratio = _sequence_mean(logprobs - known(rows.proximal), rows)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    return _clipped(ratio[rows.sample], rows, params)


def gspo_token(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return GSPO's value with the gradient through each token's own probability: GSPO-token, arXiv 2507.18071, section
    4.3."""
    log_ratio = _sequence_mean(logprobs.detach() - known(rows.proximal), rows)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    return _clipped(ratio[rows.sample] * torch.exp(logprobs - logprobs.detach()), rows, params)


def cispo(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -min(r, 1 + clip_high) A l, with no gradient through the weight: CISPO, arXiv 2506.13585, without a lower
    bound (verl has one; TRL's epsilon_high is 1 + clip_high)."""
    weight = _ratio(logprobs, known(rows.proximal)).detach().clamp(max=1.0 + params.clip_high)
    return -weight * known(rows.advantages) * logprobs


def sapo(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -4/t sigmoid(t (r - 1)) A, a soft gate with a temperature t for each sign of A: SAPO, arXiv 2511.20347."""
    ratio = _ratio(logprobs, known(rows.proximal))
    up, down = (_gate(ratio, temperature) for temperature in (params.sapo_up, params.sapo_down))
    return -torch.where(known(rows.advantages) > 0, up, down) * known(rows.advantages)


def policy_gradient(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -r A l, with no gradient through the weight: the plain policy gradient, off-policy from the batch's
    starting policy."""
    return -_ratio(logprobs, known(rows.proximal)).detach() * known(rows.advantages) * logprobs


def minirl(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -r A l, but zero for the tokens that PPO's clip would give no gradient: MiniRL, arXiv 2512.01374. (Its
    weight pi/mu is r rho: use it with a token correction.)"""
    ratio = _ratio(logprobs, known(rows.proximal)).detach()
    gone = torch.where(known(rows.advantages) > 0, ratio > 1.0 + params.clip_high, ratio < 1.0 - params.clip_low)
    return torch.where(gone, 0.0, -ratio * known(rows.advantages) * logprobs)


# -- relative to the behaviour policy ----------------------------------------------------------------------------


def dppo_tv(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -min(w, 20) A l, with no gradient through the weight, for tokens whose probability has not yet moved by
    more than dppo_trust in the direction of A, and zero otherwise: DPPO with binary total variation, arXiv 2602.04879
    (verl's dppo_tv, which also bounds the weight by 20)."""
    ratio = _ratio(logprobs, rows.behaviour).detach()
    moved = logprobs.detach().exp() - rows.behaviour.exp()
    gone = torch.where(known(rows.advantages) > 0, moved > params.dppo_trust, moved < -params.dppo_trust)
    return torch.where(gone, 0.0, -ratio.clamp(max=DPPO_MAX_RATIO) * known(rows.advantages) * logprobs)


def topr(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -A l for A > 0 and -min(W, 1) A l otherwise, with W the product of w over the sequence: tapered off-policy
    REINFORCE, arXiv 2503.14286, which weights by the whole answer (ROLL and Trinity weight by each token)."""
    log_weight = rows.sum_per_sample(logprobs.detach() - rows.behaviour)[rows.sample]
    weight = torch.exp(log_weight.clamp(max=0.0))
    return -torch.where(known(rows.advantages) > 0, 1.0, weight) * known(rows.advantages) * logprobs


def vespo(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -e^L W^k e^(-L W) A l, with W the product of w over the sequence and (k, L) = (2, 3) for A >= 0, (3, 2)
    otherwise. The weight is 1 at W = 1 and has no gradient: VESPO, arXiv 2602.10693 (the parameters are TRL's)."""
    log_ratio = rows.sum_per_sample(logprobs.detach() - rows.behaviour).clamp(max=MAX_LOG_RATIO)[rows.sample]
    good = known(rows.advantages) >= 0
    k, scale = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    weight = torch.exp(scale + k * log_ratio - scale * log_ratio.exp())
    return -weight * known(rows.advantages) * logprobs


def m2po(logprobs: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    """Return -w A, with no other bound than its token selection (selection.py): M2PO, arXiv 2510.01161."""
    return -_ratio(logprobs, rows.behaviour) * known(rows.advantages)


@dataclass(frozen=True)
class LossRow:
    """A loss and the constraints on its use."""

    loss: Loss
    against: str  # "proximal": combines with a correction; "behaviour": corrects already
    sequences: bool = False  # the loss is per sequence: requires aggregation=sequence
    selection: str | None = None  # the entry of SELECTIONS that it requires


LOSSES: dict[str, LossRow] = {
    "ppo": LossRow(ppo, "proximal"),
    "gspo": LossRow(gspo, "proximal", sequences=True),
    "gspo_token": LossRow(gspo_token, "proximal", sequences=True),
    "cispo": LossRow(cispo, "proximal"),
    "sapo": LossRow(sapo, "proximal"),
    "policy_gradient": LossRow(policy_gradient, "proximal"),
    "minirl": LossRow(minirl, "proximal"),
    "dppo_tv": LossRow(dppo_tv, "behaviour"),
    "topr": LossRow(topr, "behaviour"),
    "vespo": LossRow(vespo, "behaviour"),
    "m2po": LossRow(m2po, "behaviour", selection="m2po"),
}


# -- parts ------------------------------------------------------------------------------------------------------


def _ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    return torch.exp((logprobs - other).clamp(max=MAX_LOG_RATIO))


def _gate(ratio: Tensor, temperature: float) -> Tensor:
    return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))


def _sequence_mean(values: Tensor, rows: TokenTable) -> Tensor:
    """Return the mean over each sequence, [T] -> [S]; 0 for sequences that are not in this micro-batch."""
    return rows.sum_per_sample(values) / rows.lengths().clamp(min=1)


def _clipped(ratio: Tensor, rows: TokenTable, params: LossParams) -> Tensor:
    advantage = known(rows.advantages)
    clipped = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if params.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * params.dual_clip), loss)


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return max((V - G)^2, (clip(V, V_before - c, V_before + c) - G)^2) / 2, [T]: PPO2's clipped value loss (OpenAI
    baselines, ppo2/model.py; verl, core_algos.compute_value_loss). Without a clip it is (V - G)^2 / 2."""
    error = (values - returns) ** 2
    if clip is not None:
        near = torch.minimum(torch.maximum(values, before - clip), before + clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return error / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(G - V) / Var(G): 1 if the values are right, 0 if a constant would do as well, negative if it would
    do better; 0 if the returns do not vary."""
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())
