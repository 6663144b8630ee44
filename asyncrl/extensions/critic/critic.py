"""PPO's critic: a second network that predicts, for each token, the return of the rest of its episode. With several
adapters (agents.roles) there is one critic for all roles.

The value of a token is read from the state before the token, where the policy chose it. Tokens that the policy did not
write have no value and are skipped: the token table does not contain them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.table import TokenTable, TrainingTable
from asyncrl.extension import TrainerHooks
from asyncrl.extensions.critic.extension import CriticSettings
from asyncrl.extensions.critic.value import explained_variance, gae_raw, value_loss
from asyncrl.trainer.context import of_all_parts
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import Groups, TokenAccumulator
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.policy import Policy


class Critic(TrainerHooks):
    """The critic on one rank, sharded like the policy."""

    def __init__(self, settings: CriticSettings, policy: Policy) -> None:
        """Load the critic, and add its column, its step and its warm-up to the policy's update."""
        config = policy.config
        self._settings = settings
        self._policy = policy
        self._head: torch.nn.Module | None = None  # on the last stage
        self.network = Network(
            config.trainer,
            Path(settings.path).expanduser() if settings.path else policy.folder,
            policy.parallel,
            transformation=policy.network.transformation.of_another(),
            changed=self._add_head,
            progress=lambda part: policy.progress(f"the critic's {part}"),
            meter=policy.network.meter,
            encoder=policy.network.encoder,
            trains_encoder=False,
        )
        optimizer = config.trainer.optimizer.model_copy(update={"lr": settings.lr})
        trainer = config.trainer.model_copy(update={"optimizer": optimizer})
        self.optimizer = NetworkOptimizer(trainer, self.network, config.run.max_steps)
        policy.others["critic"] = (self.network, self.optimizer)
        policy.following.append(self.train)
        policy.trains_from = settings.warmup

    def columns(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        """Add the values of all tokens under the current weights."""
        return replace(table, values=self.network.column(groups, table.num_tokens, self._values))

    def train(self, groups: Groups, table: TrainingTable) -> dict[str, float]:
        """Take one optimizer step towards the returns, on all tokens with a nonzero weight. `table` holds the values
        before the step."""
        policy = self._policy
        returns = table.column("values") + policy.advantage.call(gae_raw, table)
        seen = TokenAccumulator(table.num_tokens, policy.parallel)
        # The advantages column carries the returns here.
        target = replace(table, weights=policy.objective.shares(groups, table), advantages=returns)
        rows_of = target.to(policy.parallel.device)

        def visit(head: Head, pack: Pack) -> Tensor:
            values = self._values(head, pack)
            rows = rows_of.rows(pack.table_rows, values.dtype)
            losses = value_loss(values, rows.column("values"), rows.advantages, self._settings.value_clip)
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

    def _values(self, head: Head, pack: Pack) -> Tensor:
        """Return the values [T] of the states in which the targets were chosen, in float32 (or the model's float64)."""
        assert self._head is not None
        values = self._head(head.hidden)[:, 0]
        values = values.to(torch.promote_types(values.dtype, torch.float32)).index_select(0, pack.row_of_target)
        return of_all_parts(values, pack, head.parallel)

    def _add_head(self, model: GPTModel) -> None:
        """Turn a stage of a model into one of a critic. Drops its vocabulary layer if it has one."""
        model.share_embeddings_and_output_weights = False  # otherwise Megatron would sum their gradients over stages
        if model.post_process:
            model.output_layer.weight = None
            parameter = next(model.parameters())
            head = torch.nn.Linear(model.config.hidden_size, 1, dtype=parameter.dtype, device=parameter.device)
            torch.nn.init.zeros_(head.weight)  # a value of 0 everywhere at the start
            torch.nn.init.zeros_(head.bias)
            self._head = model.value_head = head
            # GPTModel's own method looks for the vocabulary layer.
            model.sharded_state_dict = partial(MegatronModule.sharded_state_dict, model)
