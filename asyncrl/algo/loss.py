"""Policy losses per token, to be minimized. A new loss is one function.

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

A loss may name a token selection: a decision over the whole batch, made where its optimizer steps start, about which
tokens are trained. It depends neither on the order of the batch nor on how it is split. A token that is left out still
counts in the denominator.

Of torch this module only calls methods of tensors (algo/registry.py says why).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncrl import lookup
from asyncrl.algo.registry import AlgorithmRegistry, Function
from asyncrl.settings import AboveOne, NonNegative, Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import LossRows

MAX_LOG_RATIO = 80.0  # exp of more than this overflows float32; tighter bounds would cut gradients that PPO keeps


@dataclass(frozen=True)
class LossTraits:
    """Constraints on the use of a loss."""

    corrects: bool = False  # it weights by pi / mu itself: no correction may be added
    per_sequence: bool = False  # it is a loss over sequences: requires aggregation=sequence
    selection: Function | None = None  # decides over the whole batch which tokens are trained


LOSSES: AlgorithmRegistry[LossTraits] = AlgorithmRegistry(
    "algo.loss",
    LossTraits(),
    lambda traits: [traits.selection] if traits.selection else [],
    offered=partial(lookup.offered, "losses"),
)
"""Losses map (logprobs [T] with gradient, rows of the micro-batch) and their settings to losses [T]."""


@LOSSES.register()
def ppo(
    logprobs: Tensor,
    rows: LossRows,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.28,
    dual_clip: AboveOne | None = None,
) -> Tensor:
    """Return max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): PPO, arXiv 1707.06347, with clip-higher (DAPO, arXiv
    2503.14476). With `dual_clip` c it is at most -A c for A < 0 (arXiv 1912.09729). With a separate correction this is
    decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5)."""
    return clipped(importance_ratio(logprobs, rows.proximal), rows, clip_low, clip_high, dual_clip)


@LOSSES.register(LossTraits(per_sequence=True))
def gspo(
    logprobs: Tensor,
    rows: LossRows,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegative = 4e-4,
    dual_clip: AboveOne | None = None,
) -> Tensor:
    """Return PPO's loss of s = exp(mean over the sequence of log r), the same for all its tokens: GSPO, arXiv
    2507.18071. Its clip range has another scale (section 5.1)."""
    log_ratio = sequence_mean(logprobs - rows.proximal, rows)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return clipped(ratio[rows.sample], rows, clip_low, clip_high, dual_clip)


@LOSSES.register()
def cispo(logprobs: Tensor, rows: LossRows, *, clip_high: NonNegative = 0.28) -> Tensor:
    """Return -min(r, 1 + clip_high) A l, with no gradient through the weight: CISPO, arXiv 2506.13585, without a lower
    bound (verl has one; TRL's epsilon_high is 1 + clip_high)."""
    weight = importance_ratio(logprobs, rows.proximal).detach().clamp(max=1.0 + clip_high)
    return -weight * rows.advantages * logprobs


@LOSSES.register()
def policy_gradient(logprobs: Tensor, rows: LossRows) -> Tensor:
    """Return -r A l, with no gradient through the weight: the plain policy gradient, off-policy from the batch's
    starting policy."""
    return -importance_ratio(logprobs, rows.proximal).detach() * rows.advantages * logprobs


# -- parts ------------------------------------------------------------------------------------------------------


def importance_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return pi over another policy, [T]."""
    return (logprobs - other).clamp(max=MAX_LOG_RATIO).exp()


def sequence_mean(values: Tensor, rows: LossRows) -> Tensor:
    """Return the mean over each sequence, [T] -> [S]; 0 for sequences that are not in this micro-batch."""
    return rows.sum_per_sample(values) / rows.lengths().clamp(min=1)


def clipped(ratio: Tensor, rows: LossRows, low: float, high: float, dual: float | None) -> Tensor:
    """Return PPO's clipped loss of these ratios, [T]."""
    advantage = rows.advantages
    loss = (-advantage * ratio).maximum(-advantage * ratio.clamp(1.0 - low, 1.0 + high))
    return loss if dual is None else loss.minimum(-advantage * dual).where(advantage < 0, loss)
