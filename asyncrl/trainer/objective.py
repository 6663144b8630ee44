"""The objective of one optimizer step: which tokens count, their weights, and the loss of each."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncrl.algo.correction import CorrectionParams, correction, log_linear_proximal
from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.distill import distillation_loss, distilled_advantages
from asyncrl.algo.kl import ESTIMATORS, k3
from asyncrl.algo.loss import LOSSES, LossParams
from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import shares
from asyncrl.algo.table import TokenTable, known
from asyncrl.config import AlgoConfig, RolloutConfig
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.token_accumulator import TokenAccumulator

COLUMNS = ("logprobs", "proximal", "factor", "entropy", "advantages")
TOTALS = ("loss", "packed", "apart")


class Objective:
    """The settings of `algo` as a loss over packs. `seen` collects what the step's statistics need."""

    def __init__(self, algo: AlgoConfig, rollout: RolloutConfig) -> None:
        self._algo, self._longest, self._temperature = algo, rollout.max_new_tokens, rollout.temperature
        self._correction, self._clip = params_from_config(CorrectionParams, algo), params_from_config(LossParams, algo)
        self._loss = LOSSES[algo.loss].loss
        self.started = torch.zeros(0, dtype=torch.float64)
        """Log-probabilities [N] of the last batch's tokens under the policy that its steps started from; NaN for tokens
        that were not run."""

    # -- which tokens --------------------------------------------------------------------------------------

    def shares(self, groups: Groups, table: TokenTable) -> Tensor:
        """Return each token's weight in a step over these groups, [N]. Tokens that are not kept still count in the
        denominator."""
        samples = [sample for group in groups for sample in group]
        return shares(table, samples, self._algo.aggregation, self._longest) * known(table.keep)

    def with_gradient(self, groups: Groups, table: TokenTable) -> Groups:
        """Return the groups that have a gradient. A group whose kept tokens all have zero advantage has none; it stays
        in the denominator and is not run."""
        # these have a gradient whatever the rewards
        if self._algo.entropy_bonus or self.kl_in("loss") or self._algo.distill_coefficient:
            return groups
        signal = set(table.sample[known(table.keep) & (known(table.advantages) != 0)].tolist())
        return [group for group in groups if any(sample.number in signal for sample in group)]

    # -- the loss ------------------------------------------------------------------------------------------

    def loss(self, head: Head, pack: Pack, table: TokenTable, seen: TokenAccumulator) -> Tensor:
        """Return the loss of a micro-batch: the sum of weight * loss over its tokens. The weights include the step's
        denominator."""
        algo = self._algo
        logprobs, entropy = head.score(pack, self._temperature, entropy=algo.entropy_bonus > 0)
        rows = self._starting(logprobs, table.rows(pack.table_rows, logprobs.dtype))
        factor = correction(logprobs, rows, self._correction) * known(rows.keep)
        losses = factor * self._loss(logprobs, rows, self._clip)
        if self.kl_in("loss"):
            losses = losses + self.kl(logprobs, rows)
        if self._distils_in("loss"):
            losses = losses + distillation_loss(logprobs, rows, algo.distill_coefficient)
        if entropy is not None:
            losses = losses - algo.entropy_bonus * entropy
            seen.note(pack.table_rows, entropy=entropy)
        loss = (known(rows.weights) * losses).sum()
        advantages, proximal = known(rows.advantages), known(rows.proximal)
        seen.note(pack.table_rows, logprobs=logprobs, proximal=proximal, factor=factor, advantages=advantages)
        seen.add("loss", loss)
        return loss

    def _starting(self, logprobs: Tensor, rows: TokenTable) -> TokenTable:
        """Return the rows with the proximal policy filled in. If the batch has a single step, the proximal policy is
        the current one, detached."""
        start = logprobs.detach() if rows.proximal is None else rows.proximal
        if self._distils_in("advantage"):
            c, discount = self._algo.distill_coefficient, self._algo.distill_discount
            rows = replace(rows, advantages=distilled_advantages(logprobs, rows, c, discount))
        if self._algo.proximal == "behaviour":
            start = rows.behaviour
        elif self._algo.proximal == "log_linear":
            start = log_linear_proximal(logprobs, rows)
        return replace(rows, proximal=start)

    def kl(self, logprobs: Tensor, rows: TokenTable) -> Tensor:
        """Return each token's penalty for the KL divergence from the reference."""
        estimate = ESTIMATORS[self._algo.kl_estimator](logprobs, known(rows.reference), rows.behaviour)
        return self._algo.kl_coefficient * estimate

    def kl_in(self, place: str) -> bool:
        """Return whether the KL to the reference is applied there."""
        return self._algo.kl_coefficient > 0 and self._algo.kl_place == place

    def _distils_in(self, place: str) -> bool:
        return self._algo.distill_coefficient > 0 and self._algo.distill_place == place

    # -- statistics -----------------------------------------------------------------------------------------

    def distance(self, table: TokenTable, seen: TokenAccumulator) -> float:
        """Return the mean of KL(start || policy), as k3, over the tokens of the last step. Collective."""
        columns, _ = seen.gather(COLUMNS)
        ran = columns["seen"] & (known(table.weights) > 0)
        return float(k3(columns["proximal"], columns["logprobs"], table.behaviour)[ran].mean())

    def _entropy(self, of_tokens: Tensor) -> dict[str, float]:
        """Return the mean entropy, if it was computed."""
        asked = self._algo.entropy_bonus > 0 and len(of_tokens) > 0
        return {"entropy": float(of_tokens.mean())} if asked else {}

    def figures(self, table: TokenTable, seen: TokenAccumulator) -> dict[str, float]:
        """Return the statistics of a batch's steps. Collective."""
        columns, totals = seen.gather(COLUMNS, TOTALS)
        ran = columns["seen"]
        self.started = torch.where(ran, columns["logprobs"] if table.proximal is None else table.proximal, torch.nan)
        used = replace(table, proximal=columns["proximal"], advantages=columns["advantages"])
        start = columns["logprobs"] if table.proximal is None else table.proximal
        clip = (self._algo.clip_low, self._algo.clip_high)
        return {
            "loss": totals["loss"],
            "tokens/trained": float(ran.sum()),
            "tokens/packed": totals["packed"],
            "tokens/shared": 1.0 - totals["packed"] / max(1.0, totals["apart"]),
            **self._entropy(columns["entropy"][ran]),
            **_distances(start, table, ran, plain=self._temperature == 1.0),
            **gap_figures(replace(table, proximal=start), ran),
            **loss_figures(used, columns["logprobs"], columns["factor"], ran, cap=self._algo.correction_cap, clip=clip),
        }


def _distances(logprobs: Tensor, table: TokenTable, ran: Tensor, *, plain: bool) -> dict[str, float]:
    """Return the distance of the policy from the reference and the teacher, as k3, if they were evaluated and a token
    was run. The teacher's log-probabilities are exact at temperature 1 (`plain`); at others they are known only up to a
    baseline, which gives no distance."""
    if not bool(ran.any()):
        return {}
    others = {"kl/reference": table.reference, "kl/teacher": table.teacher if plain else None}
    asked = {name: other for name, other in others.items() if other is not None}
    found = {name: float(k3(logprobs, other, table.behaviour)[ran].mean()) for name, other in asked.items()}
    if table.teacher is not None:  # at other temperatures: the gap at temperature 1, divided by the temperature
        found["teacher/gap"] = float((logprobs - table.teacher)[ran].mean())
    return found


T = TypeVar("T")


def params_from_config(kind: type[T], algo: AlgoConfig) -> T:
    """Build a parameter dataclass, with each field taken from the setting of the same name."""
    names: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{one.name: getattr(algo, one.name) for one in names})
