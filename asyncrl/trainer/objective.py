"""The objective of one optimizer step: which tokens count, their weights, and the loss of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algo.correction import CORRECTIONS, log_linear_proximal
from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.kl import ESTIMATORS, k3
from asyncrl.algo.loss import LOSSES
from asyncrl.algo.masks import masked
from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import shares
from asyncrl.algo.table import LossRows, TokenTable, TrainingTable
from asyncrl.config import AlgoConfig, RolloutConfig
from asyncrl.extension import TrainerHooks
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import Groups, TokenAccumulator

COLUMNS = ("logprobs", "proximal", "factor", "entropy", "advantages")
TOTALS = ("loss", "packed", "apart")
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
"""Range of the statistic loss/clipped, if the loss has none of its own."""


class Objective:
    """The settings of `algo` as a loss over packs, with the terms of extensions. `seen` collects what the step's
    statistics need."""

    def __init__(self, algo: AlgoConfig, rollout: RolloutConfig, hooks: Sequence[TrainerHooks] = ()) -> None:
        self._algo = algo
        self._longest = rollout.max_new_tokens
        self._temperature = rollout.temperature
        self._hooks = hooks
        self._scored = all(one.scored for one in hooks)
        self._loss = LOSSES.find(algo.loss)
        algo.check_loss(self._loss.traits)
        self._correction = CORRECTIONS.find(algo.correction) if algo.correction else None
        self._masks = {name: value for name, value in algo.mask if value is not None}
        self.started = torch.zeros(0, dtype=torch.float64)
        """Log-probabilities [N] of the last batch's tokens under the policy that its steps started from; NaN for tokens
        that were not run."""

    # -- which tokens --------------------------------------------------------------------------------------

    @property
    def needs_start(self) -> bool:
        """Return whether the objective needs a pass with the weights that the batch's steps start from. A single step
        runs the policy that it starts from, so that no extra pass is needed."""
        algo = self._algo
        several = algo.steps > 1 and (algo.proximal == "start" or any(one.starts for one in self._hooks))
        return several or self._loss.traits.selection is not None or self.kl_in("reward")

    def select(self, table: TrainingTable) -> Tensor:
        """Return which tokens are trained, [N] bool: those of `keep` that the loss's selection leaves in."""
        selection = self._loss.traits.selection
        return self._loss.call(selection, table) if selection else table.keep

    def shares(self, groups: Groups, table: TrainingTable) -> Tensor:
        """Return each token's weight in a step over these groups, [N]. Tokens that are not kept still count in the
        denominator."""
        samples = [sample for group in groups for sample in group]
        return shares(table, samples, self._algo.aggregation, self._longest) * table.keep

    def with_gradient(self, groups: Groups, table: TrainingTable) -> Groups:
        """Return the groups that have a gradient. A group whose kept tokens all have zero advantage has none; it stays
        in the denominator and is not run."""
        # these have a gradient whatever the rewards
        if self._algo.entropy_bonus or self.kl_in("loss") or any(one.signal for one in self._hooks):
            return groups
        signal = set(table.sample[table.keep & (table.advantages != 0)].tolist())
        return [group for group in groups if any(sample.number in signal for sample in group)]

    # -- the loss ------------------------------------------------------------------------------------------

    def loss(self, head: Head, pack: Pack, table: TrainingTable, seen: TokenAccumulator) -> Tensor:
        """Return the loss of a micro-batch: the sum of weight * loss over its tokens. The weights include the step's
        denominator."""
        algo = self._algo
        logprobs, entropy = head.score(pack, self._temperature, entropy=algo.entropy_bonus > 0)
        rows = self._starting(logprobs, table.rows(pack.table_rows, logprobs.dtype))
        factor = self._correction(rows) if self._correction else torch.ones_like(rows.behaviour)
        if self._masks:
            factor = masked(factor, logprobs, rows, self._masks)
        factor = factor * rows.keep
        losses = factor * self._loss(logprobs, rows)
        if self.kl_in("loss"):
            losses = losses + self.kl(logprobs, rows)
        for hooks in self._hooks:
            losses = hooks.loss(losses, logprobs, rows)
        if entropy is not None:
            losses = losses - algo.entropy_bonus * entropy
            seen.note(pack.table_rows, entropy=entropy)
        loss = (rows.weights * losses).sum()
        noted = {"proximal": rows.proximal, "advantages": rows.advantages}
        seen.note(pack.table_rows, logprobs=logprobs, factor=factor, **noted)
        seen.add("loss", loss)
        return loss

    def _starting(self, logprobs: Tensor, rows: TrainingTable) -> LossRows:
        """Return the rows with the proximal policy filled in. If the batch has a single step, the proximal policy is
        the current one, detached."""
        start = logprobs.detach() if rows.proximal is None else rows.proximal
        if self._algo.proximal == "behaviour":
            start = rows.behaviour
        elif self._algo.proximal == "log_linear":
            start = log_linear_proximal(logprobs, rows)
        started = rows.with_proximal(start)
        for hooks in self._hooks:
            started = hooks.credited(logprobs, started)
        return started

    def kl(self, logprobs: Tensor, rows: TokenTable) -> Tensor:
        """Return each token's penalty for the KL divergence from the reference."""
        estimate = ESTIMATORS[self._algo.kl.estimator](logprobs, rows.column("reference"), rows.behaviour)
        return self._algo.kl.coefficient * estimate

    def kl_in(self, place: str) -> bool:
        """Return whether the KL to the reference is applied there."""
        return self._algo.kl.coefficient > 0 and self._algo.kl.place == place

    # -- statistics -----------------------------------------------------------------------------------------

    def distance(self, table: TrainingTable, seen: TokenAccumulator) -> float:
        """Return the mean of KL(start || policy), as k3, over the tokens of the last step. Collective."""
        columns, _ = seen.gather(COLUMNS)
        ran = columns["seen"] & (table.weights > 0)
        return float(k3(columns["proximal"], columns["logprobs"], table.behaviour)[ran].mean())

    def figures(self, table: TrainingTable, seen: TokenAccumulator) -> dict[str, float]:
        """Return the statistics of a batch's steps. Collective."""
        columns, totals = seen.gather(COLUMNS, TOTALS)
        ran = columns["seen"]
        start = columns["logprobs"] if table.proximal is None else table.proximal
        self.started = torch.where(ran, start, torch.nan)
        used = replace(table.with_proximal(columns["proximal"]), advantages=columns["advantages"])
        asked = self._algo.entropy_bonus > 0 and bool(ran.any())
        settings = {**PPO_CLIP, **self._loss.settings}
        clip = (settings["clip_low"], settings["clip_high"])
        cap = self._correction.settings.get("cap", math.inf) if self._correction else math.inf
        return {
            "loss": totals["loss"],
            "tokens/trained": float(ran.sum()),
            "tokens/packed": totals["packed"],
            "tokens/shared": 1.0 - totals["packed"] / max(1.0, totals["apart"]),
            **({"entropy": float(columns["entropy"][ran].mean())} if asked else {}),
            **self._distances(start, table, ran),
            **(gap_figures(table.with_proximal(start), ran) if self._scored else {}),
            **loss_figures(used, columns["logprobs"], columns["factor"], ran, cap=cap, clip=clip),
        }

    def _distances(self, logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
        """Return the distance of the policy from others, if a token was run: from the reference, as k3, if it was
        evaluated, and from what extensions compare it with."""
        if not bool(ran.any()):
            return {}
        found = {}
        if table.reference is not None:
            found["kl/reference"] = float(k3(logprobs, table.reference, table.behaviour)[ran].mean())
        for hooks in self._hooks:
            found |= hooks.distances(logprobs, table, ran)
        return found
