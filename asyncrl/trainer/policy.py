"""The policy in training, and the algorithm of one update from one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.algo.advantage import ADVANTAGES, AdvantageParams, gae_raw
from asyncrl.algo.correction import CorrectionParams, correction, log_linear_proximal
from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.distill import distillation_loss, distilled_advantages
from asyncrl.algo.kl import ESTIMATORS, k3
from asyncrl.algo.loss import LOSSES, LossParams
from asyncrl.algo.pack import Pack
from asyncrl.algo.replay import Replay
from asyncrl.algo.samples import build_samples, shares
from asyncrl.algo.selection import SELECTIONS, SelectionParams
from asyncrl.algo.shaping import ShapingParams, shaped, trainable
from asyncrl.algo.table import TokenTable, build_table, known
from asyncrl.config import Algo, Config
from asyncrl.parallel import Parallel
from asyncrl.trainer.critic import Critic
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.network import Network, Visit
from asyncrl.trainer.optimizer import Optimizer
from asyncrl.trainer.reference import Reference
from asyncrl.trainer.resets import Resets
from asyncrl.trainer.seen import Seen
from asyncrl.types import Batch


class Policy:
    """One per rank."""

    def __init__(self, config: Config, folder: Path, parallel: Parallel) -> None:
        self.config, self.parallel = config, parallel
        self.network = Network(config.trainer, folder, parallel)
        self.weights, self.hf = self.network.weights, self.network.hf
        replayed = config.algo.routing_replay
        self._routing = None if replayed == "none" else self.network.replay_routing(replayed)
        self._optimizer = Optimizer(config.trainer, self.network, config.run.max_steps)
        self._reference = self._load_reference(folder)
        self._replay = Replay(config.algo.replay_groups, config.rollout.max_staleness, config.run.seed)
        self._resets = Resets(config.algo.reset_every, config.algo.reset_share, self.network, self._optimizer)
        self._critic = Critic(config, folder, parallel) if config.algo.advantage == "gae" else None
        self._warm_at = config.algo.critic_warmup if self._critic else 0
        self._advantage = _taken(AdvantageParams, config.algo)
        self._correction = _taken(CorrectionParams, config.algo)
        self._clip = _taken(LossParams, config.algo)
        self._selection = _taken(SelectionParams, config.algo)
        self._shaping = _taken(ShapingParams, config.algo)

    @property
    def reused(self) -> int:
        """Groups that were trained again so far."""
        return self._replay.reused

    def update(self, batch: Batch) -> dict[str, float]:
        """The optimizer steps of one batch. Returns its figures, the same on every rank."""
        algo, longest = self.config.algo, self.config.rollout.max_new_tokens
        replayed = self._replay.draw(batch.version)
        self._replay.keep(batch.groups)
        table = build_table([*batch.groups, *replayed], batch.version)
        groups = build_samples([*batch.groups, *replayed])
        if self._routing:
            groups = self._routing.begin([*batch.groups, *replayed], groups)
        table = replace(table, reward=shaped(table, self._shaping, longest), keep=trainable(table, self._shaping))
        if algo.kl_coefficient or (algo.kl_meter_every and batch.version % algo.kl_meter_every == 0):
            table = replace(table, reference=self._of_reference(groups, table))
        selection = LOSSES[algo.loss].selection
        if algo.steps > 1 or selection or self._kl_in("reward"):  # one step starts from the policy that it runs
            with self._routing.of_policy(whole_batch=True) if self._routing else nullcontext():
                table = replace(table, proximal=self._score(groups, table))
        if self._kl_in("reward"):
            table = replace(table, token_reward=table.token_reward - self._kl(known(table.proximal), table))
        if self._critic:
            table = replace(table, values=self._critic.values(groups, table))
        table = replace(table, advantages=ADVANTAGES[algo.advantage](table, self._advantage))
        if selection:
            table = replace(table, keep=SELECTIONS[selection](table, self._selection))
        with self._routing.of_policy() if self._routing else nullcontext():
            figures = self._train(groups if batch.version >= self._warm_at else [], table)
        figures |= self._routing.figures() if self._routing else {}
        if self._critic:
            returns = known(table.values) + gae_raw(table, self._advantage)
            figures |= self._critic.train(groups, replace(table, weights=self._shares(groups, table)), returns)
        self._resets.after(batch.version + 1)
        return {"groups/replayed": float(len(replayed)), **figures}

    # -- passes --------------------------------------------------------------------------------------------

    def _of_reference(self, groups: Groups, table: TokenTable) -> Tensor:
        """[N] of frozen weights, or of the teacher, whose engines have told."""
        if self._reference is None:
            return known(table.teacher)
        with self._reference.in_place():
            return self._score(groups, table)

    def _score(self, groups: Groups, table: TokenTable) -> Tensor:
        """[N] log-probabilities of the weights as they are."""
        seen = Seen(table.num_tokens, self.parallel)

        def visit(head: Head, pack: Pack) -> Tensor:
            logprobs, _ = head.score(pack, self.config.rollout.temperature)
            seen.note(pack.table_rows, logprobs=logprobs)
            return logprobs.sum()

        self.network.score(self.network.packs(groups), visit)
        columns, _ = seen.gather(("logprobs",))
        return columns["logprobs"]

    def _train(self, groups: Groups, table: TokenTable) -> dict[str, float]:
        algo, seen = self.config.algo, Seen(table.num_tokens, self.parallel)
        lr, norms, bad, trained = self._optimizer.lr, [0.0], 0, 0
        for number, chosen in enumerate(self._mini_batches(groups)):
            table = replace(table, weights=self._shares(chosen, table) * known(table.keep))
            if not (chosen := self._with_signal(chosen, table)):
                continue
            packs = self.network.packs(chosen)
            self._optimizer.zero_grad()
            self.network.train(packs, self._visit(table.to(self.parallel.device), seen))
            seen.add("packed", sum(pack.num_tokens for pack in packs))
            if number and algo.trust_region and self._distance(table, seen) > algo.trust_region:
                break
            seen.add("apart", sum(pack.tokens_apart for pack in packs))
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
            if self._distils_in("advantage"):
                start = logprobs.detach() if rows.proximal is None else rows.proximal
                advantages = distilled_advantages(start, rows, algo.distill_coefficient, algo.distill_discount)
                rows = replace(rows, advantages=advantages)
            rows = replace(rows, proximal=self._proximal(logprobs, rows))
            factor = correction(logprobs, rows, self._correction) * known(rows.keep)
            losses = factor * LOSSES[algo.loss].loss(logprobs, rows, self._clip)
            noted = {"logprobs": logprobs, "proximal": known(rows.proximal), "factor": factor}
            noted["advantages"] = known(rows.advantages)
            if entropy is not None:
                noted["entropy"] = entropy
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
        size = max(1, -(-len(groups) // algo.mini_batches))
        for _ in range(algo.epochs):
            for start in range(0, len(groups), size):
                yield groups[start : start + size]

    def _shares(self, groups: Groups, table: TokenTable) -> Tensor:
        samples = [sample for group in groups for sample in group]
        return shares(table, samples, self.config.algo.aggregation, self.config.rollout.max_new_tokens)

    def _with_signal(self, groups: Groups, table: TokenTable) -> Groups:
        """A group whose kept tokens have no advantage has no gradient: it stays in the denominator and is not run."""
        algo = self.config.algo
        if algo.entropy_bonus or self._kl_in("loss") or algo.distill_coefficient:  # whatever the rewards
            return groups
        signal = set(table.sample[known(table.keep) & (known(table.advantages) != 0)].tolist())
        return [group for group in groups if any(sample.number in signal for sample in group)]

    def _figures(self, table: TokenTable, seen: Seen) -> dict[str, float]:
        algo = self.config.algo
        names = ("logprobs", "proximal", "factor", "entropy", "advantages")
        columns, totals = seen.gather(names, ("loss", "packed", "apart"))
        ran = columns["seen"]
        used = replace(table, proximal=columns["proximal"], advantages=columns["advantages"])
        start = columns["logprobs"] if table.proximal is None else table.proximal
        clip = (algo.clip_low, algo.clip_high)
        return {
            "loss": totals["loss"],
            "tokens/trained": float(ran.sum()),
            "tokens/packed": totals["packed"],
            "tokens/shared": 1.0 - totals["packed"] / max(1.0, totals["apart"]),
            "entropy": float(columns["entropy"][ran].mean()) if bool(ran.any()) else 0.0,
            **_distances(start, table, ran),
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


def _distances(logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
    """How far the policy is from reference and teacher, as k3; where they were asked, and a token ran."""
    others = {"kl/reference": table.reference, "kl/teacher": table.teacher}
    if not bool(ran.any()):
        return {}
    found = {
        name: float(k3(logprobs, other, table.behaviour)[ran].mean())
        for name, other in others.items()
        if other is not None
    }
    if table.teacher is not None:
        found["teacher/gap"] = float((logprobs - table.teacher)[ran].mean())
    return found


def _taken(kind: type[Any], algo: Algo) -> Any:
    """The numbers of `kind` under the same names in the configuration; gae's wait for a critic."""
    return kind(**{one.name: getattr(algo, one.name) for one in fields(kind) if one.name in Algo.model_fields})
