"""On-policy distillation: the policy's own tokens, each scored by a teacher (Lu et al., "On-Policy Distillation",
Thinking Machines 2025; GKD, arXiv 2306.13649, with reverse KL and only samples of the student).

With x_t = l_t - l_teacher,t at the tokens that the policy wrote, E_pi[x] is KL(pi || teacher) at one position, and its
gradient is E_pi[x grad l] (grad l has mean zero, so the gradient of x itself adds nothing). There are two forms of it:

    advantage    A_t <- A_t - c sum_(k >= t) discount^(k-t) sg(x_k)       the policy loss weights, corrects and clips it
    loss         + c w_t k3(x_t), w = pi / mu, gradient through both      algo/kl.py, `ratio`: gradient w x grad l

At discount 0, without clipping and with an uncapped correction, their gradients are equal (test_loss.py).
With a discount above 0, a token is also credited for the positions it leads to, at the price of variance.

l belongs to the policy in training, at every optimizer step. Other implementations use the engine's mu instead: x
measured with mu belongs to the policy that wrote the token, up to max_staleness versions ago, and weighted with pi / mu
it is the gradient of no KL. The training pass computes l anyway, so it costs nothing. A teacher that equals the policy
gives zero advantage, except for the mismatch between engine and trainer.

Temperature: engines report the log-probabilities of given tokens at temperature 1 (engines.py), and tokens are
sampled at T. With logits z, log softmax(z / T) = log softmax(z) / T + a constant for all tokens of a position, so

    l_T - l_teacher,T = (l_1 - l_teacher,1) / T + a baseline

and E_pi[baseline grad l] = 0. With both sides at temperature 1 and divided by T, the gradient at T is the same in
expectation, and a teacher that equals the policy still gives zero (`tempered`). The value is then no KL, and the term
is no valid baseline if it depends on later positions: kl/teacher, the discount and the KL's reference need T = 1.

Without the stop-gradient the term vanishes: the teacher's part has no gradient, and that of l has mean zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.algo.branches import accumulated
from asyncrl.algo.kl import k3, ratio
from asyncrl.algo.table import LossRows, TokenTable
from asyncrl.extension import TrainerHooks

if TYPE_CHECKING:
    from asyncrl.trainer.microbatches import Groups
    from asyncrl.trainer.policy import Policy


def tempered(start: Tensor, plain: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return a substitute for the teacher's log-probabilities at `temperature`, up to a baseline, [N]. `start` holds
    the policy's l at that temperature, `plain` its l at temperature 1; `teacher` is at temperature 1."""
    return start - (plain - teacher) / temperature


def chain(owner: Tensor) -> Tensor:
    """Return the index of the previous entry with the same owner, -1: none, [n]. Entries of one owner must be
    contiguous."""
    before = torch.arange(len(owner), device=owner.device) - 1
    before[1:] = torch.where(owner[1:] == owner[:-1], before[1:], -1)
    return before


def distilled_advantages(logprobs: Tensor, rows: LossRows, coefficient: float, discount: float) -> Tensor:
    """Return the rows' advantages minus the cost of their distance to the teacher, [T], without gradient; `logprobs`
    [T] are l.

    Tokens that the policy did not write have no row: the discounted sum skips them without decay. It ends with the
    sample, not the episode, whose other samples may be in other micro-batches; at discount 0 there is no difference.
    The rows of a sample must be contiguous, in order and complete.
    """
    differences = logprobs.detach() - rows.column("teacher")
    if discount:
        differences = accumulated(differences, chain(rows.sample), discount)
    return rows.advantages - coefficient * differences


def distillation_loss(logprobs: Tensor, rows: LossRows, coefficient: float) -> Tensor:
    """Return the term to add to the policy's loss, [T]; `logprobs` [T] carry the gradient."""
    return coefficient * ratio(logprobs, rows.column("teacher"), rows.behaviour)


class Distillation(TrainerHooks):
    """Distillation on a trainer rank."""

    def __init__(self, settings: Any, policy: Policy) -> None:
        """`settings` are those of extension.py."""
        self._settings, self._policy = settings, policy
        self._temperature = policy.config.rollout.temperature
        self.signal = settings.coefficient > 0

    def columns(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        """Replace the log-probabilities of the teacher, which is scored at temperature 1 only, by those at the sampling
        temperature."""
        if table.teacher is None or self._temperature == 1.0:
            return table
        if table.proximal is None:
            table = self._policy.add_start(groups, table, version)
        plain = self._policy.score_at(1.0, groups, table)
        teacher = tempered(table.column("proximal"), plain, table.column("teacher"), self._temperature)
        return replace(table, teacher=teacher)

    def credited(self, logprobs: Tensor, rows: LossRows) -> LossRows:
        """Subtract the cost of the distance to the teacher from the advantages, if it has its place there."""
        if not self.signal or self._settings.place != "advantage":
            return rows
        c, discount = self._settings.coefficient, self._settings.discount
        return replace(rows, advantages=distilled_advantages(logprobs, rows, c, discount))

    def loss(self, losses: Tensor, logprobs: Tensor, rows: LossRows) -> Tensor:
        """Add the distance to the teacher, if it has its place there."""
        if not self.signal or self._settings.place != "loss":
            return losses
        return losses + distillation_loss(logprobs, rows, self._settings.coefficient)

    def distances(self, logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
        """Return the distance of the policy from the teacher, as k3 and k1, if there is one. The teacher's
        log-probabilities are exact at temperature 1; at others they are known only up to a baseline, which gives no
        distance, and the gap is that at temperature 1, divided by the temperature."""
        if (teacher := table.teacher) is None:
            return {}
        gap = {"teacher/gap": float((logprobs - teacher)[ran].mean())}
        if self._temperature != 1.0:
            return gap
        return {"kl/teacher": float(k3(logprobs, teacher, table.behaviour)[ran].mean()), **gap}
