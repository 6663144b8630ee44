"""The policy in training: one update from one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from asyncrl import lookup
from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.diagnostics import step_figures
from asyncrl.algo.loss import LOSSES
from asyncrl.algo.samples import build_samples
from asyncrl.algo.shaping import shaped, trainable
from asyncrl.algo.table import TokenTable, TrainingTable, build_table
from asyncrl.config import Config
from asyncrl.config.rules import check_traits
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer.batch_parts import BatchParts
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.encoder import encoder_of
from asyncrl.trainer.microbatches import Groups, TokenAccumulator
from asyncrl.trainer.network import Network
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.parallel import reseed
from asyncrl.trainer.reference import reference_of
from asyncrl.weights.checksum import SentWeights
from asyncrl.weights.publish import StagedPublisher

if TYPE_CHECKING:
    from asyncrl.trainer.publishers import Publishing


class Policy:
    """The policy on one rank, with everything that an update needs."""

    def __init__(
        self, config: Config, folder: Path, parallel: Parallel, progress: Callable[[str], None] = lambda part: None
    ) -> None:
        """Load the model of an HF folder. `progress` is called at the start of each micro-batch."""
        algo = config.algo
        self.config = config
        self.parallel = parallel
        self.folder = folder
        self.progress = progress
        extensions = lookup.active(config)
        changes = (one.transformation(config) for one in extensions.values())
        self.network = Network(
            config.trainer,
            folder,
            parallel,
            transformation=next((found for found in changes if found), None),
            progress=progress,
            encoder=encoder_of(config, folder, parallel),
        )
        self.weights = self.network.weights
        self.hf = self.network.hf
        self.optimizer = NetworkOptimizer(config.trainer, self.network, config.run.max_steps)
        self._reference = reference_of(algo.kl, self.network, folder) if algo.measures_reference else None
        self.advantage = ADVANTAGES.find(algo.advantage)
        check_traits(config, self.advantage.traits, LOSSES.find(algo.loss).traits)
        self._temperature = config.rollout.temperature
        self._parts = BatchParts(config.trainer.batch_parts, algo.aggregation, parallel)
        self._added = 0  # tokens of the last batch that extensions added to it
        self.readable: Callable[[Tensor], Tensor] = lambda tensor: tensor
        """Returns where the elements of one of this rank's tensors can be read between two batches. An extension that
        moves them may replace it."""
        self.others: dict[str, tuple[Network, NetworkOptimizer]] = {}
        """Networks that extensions train beside the policy, by the name of their checkpoint folder."""
        self.following: list[Callable[[Groups, TrainingTable], dict[str, float]]] = []
        """What acts after the optimizer steps of a batch, and returns statistics. Extensions may add to it."""
        self.trains_from = 0
        """Version from which on batches train the policy. An extension may raise it."""
        self.hooks = {name: one.trainer(self) for name, one in extensions.items()}
        """Extensions that act in this run, by name."""
        self.objective = Objective(algo, config.rollout, list(self.hooks.values()))
        self._columns = list(self._stages_of_columns())

    def sent(self) -> SentWeights:
        """Return the weights that engines get: what each extension makes of those of the one before."""
        weights: SentWeights = self.weights
        for hooks in self.hooks.values():
            weights = hooks.sent(weights)
        return weights

    def publisher(self, publishing: Publishing) -> tuple[StagedPublisher, str] | None:
        """Return the publisher of an extension, and the reason for it; None if all weights are sent."""
        return next((found for hooks in self.hooks.values() if (found := hooks.publisher(publishing))), None)

    def batches(self, client: Callable[[], BatchSource]) -> BatchSource | None:
        """Return the batches of a mode of an extension; None if this run generates its own. `client` returns those of
        the server in the place of the rollout process."""
        return next((found for hooks in self.hooks.values() if (found := hooks.batches(client))), None)

    @property
    def started(self) -> Tensor:
        """Log-probabilities [N] of the last batch's tokens under the policy that its steps started from, NaN for tokens
        that were not run."""
        return self.objective.started[: len(self.objective.started) - self._added]

    def networks(self) -> list[Network]:
        """Return the networks that are trained."""
        return [self.network, *(network for network, _ in self.others.values())]

    def frozen(self) -> list[Tensor]:
        """Return the weights of the reference and of a vision tower that is not part of the network."""
        holders = [self._reference, self.network.encoder]
        return [tensor for holder in holders if holder for tensor in holder.states()]

    # -- one batch -----------------------------------------------------------------------------------------

    @contextmanager
    def around_update(self, batch: Batch, run_dir: Path) -> Iterator[None]:
        """Enter what extensions put around the update of a batch."""
        with ExitStack() as blocks:
            for hooks in self.hooks.values():
                blocks.enter_context(hooks.around_update(batch, run_dir))
            yield

    def update(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch. Returns its statistics, which are the same on every rank. Of a batch
        that comes in parts (trainer.batch_parts), each part adds its gradient, and the step follows the last one;
        the others return nothing."""
        self._seed(batch.version)
        trained = self._with_added(batch)
        groups: Groups = build_samples(trained, self.network.transformation.model_of)
        groups = self.network.encoder.begin(trained, groups)
        for hooks in self.hooks.values():
            groups = hooks.samples(trained, groups, first=not self._parts.begun)
        table = build_table(trained, batch.version)
        for add in self._columns:
            table = add(groups, table, batch.version)
        shaping = self.config.algo.shaping
        keep = trainable(table, shaping) if shaping.mask_truncated else None
        step = table.trained(self.advantage(table), keep)
        step = replace(step, keep=self.objective.select(step))
        with self._passes():
            figures = self._take_steps(groups, step, batch)
        if not batch.last:
            return {}
        for follow in self.following:
            figures |= follow(groups, step)
        for hooks in self.hooks.values():
            figures |= hooks.after_update(batch.version + 1)
        return figures

    def _seed(self, version: int) -> None:
        if self.network.transformation.random and not self._parts.begun:  # so that a resumed run draws the same numbers
            reseed(self.config.run.seed + version)

    def _with_added(self, batch: Batch) -> list[Group]:
        """Return the groups of the batch, and those that extensions train beside them."""
        added = [group for hooks in self.hooks.values() for group in hooks.before_update(batch)]
        self._added = sum(group.num_tokens for group in added)
        return [*batch.groups, *added]

    def _stages_of_columns(self) -> Iterator[Callable[[Groups, TokenTable, int], TokenTable]]:
        """Yield what adds the columns that the algorithm needs to a table of a version, each after those that it needs
        itself."""
        algo, objective = self.config.algo, self.objective
        if algo.shaping.changes_rewards:
            yield self._add_shaped_reward
        if algo.measures_reference:
            yield self._add_reference
        if objective.needs_start:
            yield self.add_start
        yield from (hooks.columns for hooks in self.hooks.values())
        if objective.kl_in("reward"):
            yield self._add_penalty

    def _add_shaped_reward(self, _: Groups, table: TokenTable, __: int) -> TokenTable:
        return replace(table, reward=shaped(table, self.config.algo.shaping, self.config.rollout.max_new_tokens))

    def _add_reference(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        """Add the log-probabilities of the reference, for the loss, or where they are only measured, every so often."""
        kl = self.config.algo.kl
        if not kl.coefficient and version % kl.measure_every:
            return table
        return replace(table, reference=self._of_reference(groups, table))

    def add_start(self, groups: Groups, table: TokenTable, _: int) -> TokenTable:
        """Add the log-probabilities under the policy that the steps start from."""
        with self._passes(start=True):
            return replace(table, proximal=self._score(groups, table))

    def score_at(self, temperature: float, groups: Groups, table: TokenTable) -> Tensor:
        """Return the log-probabilities under the policy at another temperature, [N], for hooks that add columns."""
        with self._passes():
            return self._score(groups, table, temperature)

    def _add_penalty(self, _: Groups, table: TokenTable, __: int) -> TokenTable:
        penalty = self.objective.kl(table.column("proximal"), table)
        return replace(table, token_reward=table.token_reward - penalty)

    def _take_steps(self, groups: Groups, table: TrainingTable, batch: Batch) -> dict[str, float]:
        if self._parts.begun or not batch.last:
            return self._parts.train(self, groups, table, last=batch.last)
        return self._train(groups if batch.version >= self.trains_from else [], table)

    @contextmanager
    def _passes(self, *, start: bool = False) -> Iterator[None]:
        """Mark the passes inside the block as the policy's, for extensions."""
        with ExitStack() as blocks:
            for hooks in self.hooks.values():
                blocks.enter_context(hooks.passes(start=start))
            yield

    # -- passes --------------------------------------------------------------------------------------------

    def _train(self, groups: Groups, table: TrainingTable) -> dict[str, float]:
        """Take the optimizer steps: one for each mini-batch, as long as the policy stays in the trust region."""
        objective, seen = self.objective, TokenAccumulator(table.num_tokens, self.parallel)
        trust, lr = self.config.algo.trust_region, self.optimizer.lr
        norms, bad, trained = [0.0], 0, 0
        for number, chosen in enumerate(self._mini_batches(groups)):
            table = replace(table, weights=objective.shares(chosen, table))
            if not (chosen := objective.with_gradient(chosen, table)):
                continue
            self.accumulate(chosen, table, seen)
            if number and trust and objective.distance(table, seen) > trust:
                break
            norm, applied = self.optimizer.step()
            norms.append(norm)
            bad, trained = bad + (not applied), trained + len(chosen)
        self.network.gather()
        return {**step_figures(norms, bad, lr, trained), **objective.figures(table, seen)}

    def accumulate(
        self, groups: Groups, table: TrainingTable, seen: TokenAccumulator, *, first: bool = True, last: bool = True
    ) -> None:
        """Compute the gradient of these groups, and add it to that of earlier parts of the step unless they are the
        `first`."""
        packs, here = self.network.packs(groups), table.to(self.parallel.device)
        if first:
            self.optimizer.zero_grad()
        self.network.train(packs, partial(self.objective.loss, table=here, seen=seen), first=first, last=last)
        seen.add("packed", sum(pack.num_tokens for pack in packs))
        seen.add("apart", sum(pack.tokens_apart for pack in packs))

    def _mini_batches(self, groups: Groups) -> Iterator[Groups]:
        """Yield whole groups in the order of the batch, once per epoch."""
        algo = self.config.algo
        size = max(1, -(-len(groups) // algo.mini_batches))
        for _ in range(algo.epochs):
            for start in range(0, len(groups), size):
                yield groups[start : start + size]

    def _score(self, groups: Groups, table: TokenTable, temperature: float | None = None) -> Tensor:
        """Return the log-probabilities under the current weights, [N], at the sampling temperature or another one."""
        used = self._temperature if temperature is None else temperature
        return self.network.column(groups, table.num_tokens, lambda head, pack: head.score(pack, used)[0])

    # -- the reference -------------------------------------------------------------------------------------

    def _of_reference(self, groups: Groups, table: TokenTable) -> Tensor:
        """Return the log-probabilities of the reference, [N]: of frozen weights, or a column of the batch."""
        if (column := self.config.algo.kl.reference) != "weights":
            return table.column(column)
        with self._reference.in_place() if self._reference else self.network.base():
            return self._score(groups, table)
