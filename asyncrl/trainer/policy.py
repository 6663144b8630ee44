"""The policy in training, and the algorithm of one update from one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.algo.advantage import ADVANTAGES, AdvantageParams
from asyncrl.algo.correction import CorrectionParams, correction, log_linear_proximal
from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.loss import LOSSES, LossParams
from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import Sample, build_samples, shares
from asyncrl.algo.table import TokenTable, build_table, known
from asyncrl.config import Algo, Config
from asyncrl.parallel import Parallel
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import packs_of_rank
from asyncrl.trainer.network import Network, Visit
from asyncrl.trainer.optimizer import Optimizer
from asyncrl.trainer.seen import Seen
from asyncrl.types import Batch

Groups = Sequence[list[Sample]]


class Policy:
    """One per rank."""

    def __init__(self, config: Config, folder: Path, parallel: Parallel) -> None:
        self.config, self.parallel = config, parallel
        self.network = Network(config.trainer, folder, parallel)
        self.weights, self.hf = self.network.weights, self.network.hf
        self._optimizer = Optimizer(config.trainer, self.network, config.run.max_steps)
        self._advantage = _taken(AdvantageParams, config.algo)
        self._correction = _taken(CorrectionParams, config.algo)
        self._clip = _taken(LossParams, config.algo)

    def update(self, batch: Batch) -> dict[str, float]:
        """The optimizer steps of one batch. Returns its figures, the same on every rank."""
        algo = self.config.algo
        table, groups = build_table(batch.groups, batch.version), build_samples(batch.groups)
        if algo.steps > 1:  # with one step the policy that it starts from is the one that it runs
            table = replace(table, proximal=self._score(groups, table))
        table = replace(table, advantages=ADVANTAGES[algo.advantage](table, self._advantage))
        return self._train(groups, table)

    # -- passes --------------------------------------------------------------------------------------------

    def _score(self, groups: Groups, table: TokenTable) -> Tensor:
        """[N] log-probabilities of the weights as they are."""
        seen = Seen(table.num_tokens, self.parallel)

        def visit(head: Head, pack: Pack) -> Tensor:
            logprobs, _ = head.score(pack, self.config.rollout.temperature)
            seen.note(pack.table_rows, logprobs=logprobs)
            return logprobs.sum()

        self.network.score(packs_of_rank(groups, self.config.trainer, self.parallel), visit)
        columns, _ = seen.gather(("logprobs",))
        return columns["logprobs"]

    def _train(self, groups: Groups, table: TokenTable) -> dict[str, float]:
        seen = Seen(table.num_tokens, self.parallel)
        lr, norms, bad, trained = self._optimizer.lr, [0.0], 0, 0
        for chosen in self._mini_batches(groups):
            table = replace(table, weights=self._shares(chosen, table))
            if not (chosen := self._with_signal(chosen, table)):
                continue
            packs = packs_of_rank(chosen, self.config.trainer, self.parallel)
            self._optimizer.zero_grad()
            self.network.train(packs, self._visit(table.to(self.parallel.device), seen))
            seen.add("packed", sum(pack.num_tokens for pack in packs))
            norm, applied = self._optimizer.step()
            norms.append(norm)
            bad, trained = bad + (not applied), trained + len(chosen)
        return {
            "groups/trained": float(trained),
            "lr": lr,
            "grad_norm": max(norms),
            "steps/optimizer": float(len(norms) - 1 - bad),
            "step/skipped": float(len(norms) - 1 == bad),
            "step/bad": float(bad > 0),
            **self._figures(table, seen),
        }

    def _visit(self, table: TokenTable, seen: Seen) -> Visit:
        """The loss of a micro-batch: sum of weight * loss over its tokens; the weights carry the step's denominator."""
        algo = self.config.algo

        def visit(head: Head, pack: Pack) -> Tensor:
            logprobs, entropy = head.score(pack, self.config.rollout.temperature, entropy=algo.entropy_bonus > 0)
            rows = table.rows(pack.table_rows, logprobs.dtype)
            rows = replace(rows, proximal=self._proximal(logprobs, rows))
            factor = correction(rows, self._correction)
            losses = factor * LOSSES[algo.loss].loss(logprobs, rows, self._clip)
            noted = {"logprobs": logprobs, "proximal": known(rows.proximal), "factor": factor}
            if entropy is not None:
                noted["entropy"] = entropy
                losses = losses - algo.entropy_bonus * entropy
            loss = (known(rows.weights) * losses).sum()
            seen.note(pack.table_rows, **noted)
            seen.add("loss", loss)
            return loss

        return visit

    def _proximal(self, logprobs: Tensor, rows: TokenTable) -> Tensor:
        if self.config.algo.proximal == "behaviour":
            return rows.behaviour
        if self.config.algo.proximal == "log_linear":
            return log_linear_proximal(logprobs, rows)
        return logprobs.detach() if rows.proximal is None else rows.proximal

    # -- which tokens --------------------------------------------------------------------------------------

    def _mini_batches(self, groups: Groups) -> Iterator[Groups]:
        """Whole groups in the order of the batch, once for every epoch."""
        algo = self.config.algo
        size = -(-len(groups) // algo.mini_batches)
        for _ in range(algo.epochs):
            for start in range(0, len(groups), size):
                yield groups[start : start + size]

    def _shares(self, groups: Groups, table: TokenTable) -> Tensor:
        samples = [sample for group in groups for sample in group]
        return shares(table, samples, self.config.algo.aggregation, self.config.rollout.max_new_tokens)

    def _with_signal(self, groups: Groups, table: TokenTable) -> Groups:
        """A group without advantage has no gradient: it stays in the denominator and is not run."""
        if self.config.algo.entropy_bonus:
            return groups
        signal = set(table.sample[known(table.advantages) != 0].tolist())
        return [group for group in groups if any(sample.number in signal for sample in group)]

    def _figures(self, table: TokenTable, seen: Seen) -> dict[str, float]:
        algo = self.config.algo
        columns, totals = seen.gather(("logprobs", "proximal", "factor", "entropy"), ("loss", "packed"))
        ran = columns["seen"]
        used = replace(table, proximal=columns["proximal"])
        start = columns["logprobs"] if table.proximal is None else table.proximal
        clip = (algo.clip_low, algo.clip_high)
        return {
            "loss": totals["loss"],
            "tokens/trained": float(ran.sum()),
            "tokens/packed": totals["packed"],
            "entropy": float(columns["entropy"][ran].mean()) if bool(ran.any()) else 0.0,
            **gap_figures(replace(table, proximal=start), ran),
            **loss_figures(used, columns["logprobs"], columns["factor"], ran, cap=algo.correction_cap, clip=clip),
        }


def _taken(kind: type[Any], algo: Algo) -> Any:
    """The numbers of `kind` under the same names in the configuration; what it does not have keeps its default."""
    return kind(**{field.name: getattr(algo, field.name) for field in fields(kind) if hasattr(algo, field.name)})
