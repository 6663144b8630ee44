"""The policy in training, and the algorithm of one update from one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.algo.advantage import ADVANTAGES, AdvantageParams
from asyncrl.algo.correction import CorrectionParams, correction, log_linear_proximal
from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.distill import distillation_loss, distilled_advantages, tempered
from asyncrl.algo.kl import ESTIMATORS, k3
from asyncrl.algo.loss import LOSSES, LossParams
from asyncrl.algo.pack import Pack
from asyncrl.algo.replay import Replay
from asyncrl.algo.samples import Sample, build_samples, shares
from asyncrl.algo.table import TokenTable, build_table, known
from asyncrl.config import Algo, Config
from asyncrl.parallel import Parallel
from asyncrl.trainer.logprobs import token_entropy, token_logprobs
from asyncrl.trainer.microbatches import packs_of_rank
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import Optimizer
from asyncrl.trainer.reference import Reference
from asyncrl.trainer.resets import Resets
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
        self._reference = self._load_reference(folder)
        self._replay = Replay(config.algo.replay_groups, config.rollout.max_staleness, config.run.seed)
        self._resets = Resets(config.algo.reset_every, config.algo.reset_share, self.network, self._optimizer)
        self._advantage = _taken(AdvantageParams, config.algo)
        self._correction = _taken(CorrectionParams, config.algo)
        self._clip = _taken(LossParams, config.algo)
        self._temperature = config.rollout.temperature
        self._where = {"vocab": self.hf["vocab_size"], "temperature": self._temperature, "parallel": parallel}

    @property
    def reused(self) -> int:
        """Groups that were trained again so far."""
        return self._replay.reused

    def update(self, batch: Batch) -> dict[str, float]:
        """The optimizer steps of one batch. Returns its figures, the same on every rank."""
        algo = self.config.algo
        replayed = self._replay.draw(batch.version)
        self._replay.keep(batch.groups)
        table = build_table([*batch.groups, *replayed], batch.version)
        groups = build_samples([*batch.groups, *replayed])
        if algo.kl_coefficient or (algo.kl_meter_every and batch.version % algo.kl_meter_every == 0):
            table = replace(table, reference=self._of_reference(groups, table))
        if table.teacher is not None and self._temperature != 1.0:
            start, plain = self._score(groups, table), self._score(groups, table, temperature=1.0)
            table = replace(table, proximal=start, teacher=tempered(start, plain, table.teacher, self._temperature))
        elif algo.steps > 1 or self._kl_in("reward"):  # one step starts from the policy that it runs
            table = replace(table, proximal=self._score(groups, table))
        if self._kl_in("reward"):
            table = replace(table, token_reward=table.token_reward - self._kl(known(table.proximal), table))
        table = replace(table, advantages=ADVANTAGES[algo.advantage](table, self._advantage))
        figures = self._train(groups, table)
        self._resets.after(batch.version + 1)
        return {"groups/replayed": float(len(replayed)), **figures}

    # -- passes --------------------------------------------------------------------------------------------

    def _of_reference(self, groups: Groups, table: TokenTable) -> Tensor:
        """[N] of frozen weights, or of the teacher, whose engines have told."""
        if self._reference is None:
            return known(table.teacher)
        with self._reference.in_place():
            return self._score(groups, table)

    def _score(self, groups: Groups, table: TokenTable, temperature: float | None = None) -> Tensor:
        """[N] log-probabilities of the weights as they are, at the sampling temperature or another."""
        seen = Seen(table.num_tokens, self.parallel)
        where = {**self._where, "temperature": temperature or self._temperature}

        def visit(logits: Tensor, pack: Pack) -> Tensor:
            logprobs, _ = token_logprobs(logits, pack, **where)
            seen.note(pack.table_rows, logprobs=logprobs)
            return logprobs.sum()

        self.network.score(packs_of_rank(groups, self.config.trainer, self.parallel), visit)
        columns, _ = seen.gather(("logprobs",))
        return columns["logprobs"]

    def _train(self, groups: Groups, table: TokenTable) -> dict[str, float]:
        algo, seen = self.config.algo, Seen(table.num_tokens, self.parallel)
        lr, norms, bad, trained = self._optimizer.lr, [0.0], 0, 0
        for number, chosen in enumerate(self._mini_batches(groups)):
            table = replace(table, weights=self._shares(chosen, table))
            if not (chosen := self._with_signal(chosen, table)):
                continue
            packs = packs_of_rank(chosen, self.config.trainer, self.parallel)
            self._optimizer.zero_grad()
            self.network.train(packs, self._visit(table.to(self.parallel.device), seen))
            seen.add("packed", sum(pack.num_tokens for pack in packs))
            if number and algo.trust_region and self._distance(table, seen) > algo.trust_region:
                break
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

    def _visit(self, table: TokenTable, seen: Seen) -> Callable[[Tensor, Pack], Tensor]:
        """The loss of a micro-batch: sum of weight * loss over its tokens; the weights carry the step's denominator."""
        algo = self.config.algo

        def visit(logits: Tensor, pack: Pack) -> Tensor:
            logprobs, log_z = token_logprobs(logits, pack, **self._where)
            rows = table.rows(pack.table_rows, logprobs.dtype)
            if self._distils_in("advantage"):
                advantages = distilled_advantages(logprobs, rows, algo.distill_coefficient, algo.distill_discount)
                rows = replace(rows, advantages=advantages)
            rows = replace(rows, proximal=self._proximal(logprobs, rows))
            factor = correction(rows, self._correction)
            losses = factor * LOSSES[algo.loss].loss(logprobs, rows, self._clip)
            noted = {"logprobs": logprobs, "proximal": known(rows.proximal), "factor": factor}
            noted["advantages"] = known(rows.advantages)
            if algo.entropy_bonus:
                noted["entropy"] = entropy = token_entropy(logits, log_z, pack, **self._where)
                losses = losses - algo.entropy_bonus * entropy
            if self._kl_in("loss"):
                losses = losses + self._kl(logprobs, rows)
            if self._distils_in("loss"):
                losses = losses + distillation_loss(logprobs, rows, algo.distill_coefficient)
            loss = (known(rows.weights) * losses).sum()
            seen.note(pack.table_rows, **noted)
            seen.add("loss", loss)
            return loss

        return visit

    def _kl_in(self, place: str) -> bool:
        return self.config.algo.kl_coefficient > 0 and self.config.algo.kl_place == place

    def _distils_in(self, place: str) -> bool:
        return self.config.algo.distill_coefficient > 0 and self.config.algo.distill_place == place

    def _kl(self, logprobs: Tensor, rows: TokenTable) -> Tensor:
        """What the distance to the reference costs each token."""
        algo = self.config.algo
        return algo.kl_coefficient * ESTIMATORS[algo.kl_estimator](logprobs, known(rows.reference), rows.behaviour)

    def _distance(self, table: TokenTable, seen: Seen) -> float:
        """Mean over the tokens of the last mini-batch of KL(start || policy), as k3."""
        columns, _ = seen.gather(("logprobs", "proximal"))
        ran = columns["seen"] & (known(table.weights) > 0)
        return float(k3(columns["proximal"], columns["logprobs"], table.behaviour)[ran].mean())

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
        algo = self.config.algo
        if algo.entropy_bonus or self._kl_in("loss") or algo.distill_coefficient:  # whatever the rewards
            return groups
        signal = set(table.sample[known(table.advantages) != 0].tolist())
        return [group for group in groups if any(sample.number in signal for sample in group)]

    def _figures(self, table: TokenTable, seen: Seen) -> dict[str, float]:
        algo = self.config.algo
        names = ("logprobs", "proximal", "factor", "entropy", "advantages")
        columns, totals = seen.gather(names, ("loss", "packed"))
        ran = columns["seen"]
        used = replace(table, proximal=columns["proximal"], advantages=columns["advantages"])
        start = columns["logprobs"] if table.proximal is None else table.proximal
        clip = (algo.clip_low, algo.clip_high)
        return {
            "loss": totals["loss"],
            "tokens/trained": float(ran.sum()),
            "tokens/packed": totals["packed"],
            "entropy": float(columns["entropy"][ran].mean()) if bool(ran.any()) else 0.0,
            **_distances(start, table, ran, plain=self._temperature == 1.0),
            **gap_figures(replace(table, proximal=start), ran),
            **loss_figures(used, columns["logprobs"], columns["factor"], ran, cap=algo.correction_cap, clip=clip),
        }

    def _load_reference(self, folder: Path) -> Reference | None:
        """Where the KL to frozen weights is wanted."""
        algo = self.config.algo
        if algo.reference == "teacher" or not (algo.kl_coefficient or algo.kl_meter_every):
            return None
        path = Path(algo.reference_path).expanduser() if algo.reference_path else folder
        return Reference(self.network, path, offload=algo.reference_offload)


def _distances(logprobs: Tensor, table: TokenTable, ran: Tensor, *, plain: bool) -> dict[str, float]:
    """How far the policy is from reference and teacher, as k3; where they were asked, and a token ran. The teacher's is
    known at temperature 1 (`plain`); elsewhere up to a baseline, which is no distance."""
    others = {"kl/reference": table.reference, "kl/teacher": table.teacher if plain else None}
    if not bool(ran.any()):
        return {}
    found = {
        name: float(k3(logprobs, other, table.behaviour)[ran].mean())
        for name, other in others.items()
        if other is not None
    }
    if table.teacher is not None:  # elsewhere: at temperature 1, over the temperature
        found["teacher/gap"] = float((logprobs - table.teacher)[ran].mean())
    return found


def _taken(kind: type[Any], algo: Algo) -> Any:
    """The numbers of `kind` under the same names in the configuration; its own defaults for what has no field yet."""
    return kind(**{field.name: getattr(algo, field.name) for field in fields(kind) if hasattr(algo, field.name)})
