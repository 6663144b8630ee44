"""PPO's critic: a second network that predicts, for each token, the return of the rest of its episode. With several
adapters (agents.roles) there is one critic for all roles.

The value of a token is read from the state before the token, where the policy chose it. Tokens that the policy did not
write have no value and are skipped: the token table does not contain them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from asyncrl.algo.loss import explained_variance, value_loss
from asyncrl.algo.pack import Pack
from asyncrl.algo.table import TokenTable, TrainingTable
from asyncrl.config import Config
from asyncrl.parallel import Parallel
from asyncrl.trainer.head import Head
from asyncrl.trainer.meter import StepMeter
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.network import Network
from asyncrl.trainer.offload import HeldTensors
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.token_accumulator import TokenAccumulator
from asyncrl.trainer.vision import ImageEncoder


class Critic:
    """The critic on one rank, sharded like the policy."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        parallel: Parallel,
        progress: Callable[[str], None] = lambda part: None,
        meter: StepMeter | None = None,
        vision: ImageEncoder | None = None,
    ) -> None:
        self._config = config
        self._parallel = parallel
        start = Path(config.algo.critic.path).expanduser() if config.algo.critic.path else folder
        lora = config.trainer.lora
        if len(config.agents.adapters) > 1:  # lora.path holds several adapters, and none is the critic's
            lora = lora.model_copy(update={"path": None})
        self.network = Network(
            config.trainer.model_copy(update={"lora": lora}),
            start,
            parallel,
            value_head=True,
            progress=lambda part: progress(f"the critic's {part}"),
            meter=meter,
            vision=vision,
        )
        optimizer = config.trainer.optimizer.model_copy(update={"lr": config.algo.critic.lr})
        trainer = config.trainer.model_copy(update={"optimizer": optimizer})
        self.optimizer = NetworkOptimizer(trainer, self.network, config.run.max_steps)

    def held(self) -> HeldTensors:
        """Return the tensors that take memory; the parameters are states, because they are not published."""
        states = [*self.network.parameters(), *self.network.packed(), *self.optimizer.states()]
        return HeldTensors([], self.network.gradients(), states)

    def values(self, groups: Groups, table: TokenTable) -> Tensor:
        """Return the values of all tokens under the current weights, [N]."""
        return self.network.column(groups, table.num_tokens, Head.values)

    def train(self, groups: Groups, table: TrainingTable, returns: Tensor) -> dict[str, float]:
        """Take one optimizer step towards `returns` [N], on all tokens with a nonzero weight. `table` holds the values
        before the step."""
        seen = TokenAccumulator(table.num_tokens, self._parallel)
        # The advantages column carries the returns here.
        rows_of = replace(table, advantages=returns).to(self._parallel.device)

        def visit(head: Head, pack: Pack) -> Tensor:
            values = head.values(pack)
            rows = rows_of.rows(pack.table_rows, values.dtype)
            losses = value_loss(values, rows.column("values"), rows.advantages, self._config.algo.critic.value_clip)
            loss = (rows.weights * losses).sum()
            seen.add("loss", loss)
            return loss

        self.optimizer.zero_grad()
        self.network.train(self.network.packs(groups), visit)
        norm, applied = self.optimizer.step()
        self.network.gather()
        _, totals = seen.gather((), ("loss",))
        return {
            "critic/loss": totals["loss"],
            "critic/grad_norm": norm,
            "critic/skipped": float(not applied),
            "critic/explained_variance": explained_variance(table.column("values"), returns),
            "critic/value": float(table.column("values").mean()) if table.num_tokens else 0.0,
        }
