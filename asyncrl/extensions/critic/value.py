"""Generalized advantage estimates, and the critic's loss. Of torch this module only calls methods of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algo.advantage import ADVANTAGES, AdvantageTraits, whiten
from asyncrl.settings import Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TokenTable


@ADVANTAGES.register(AdvantageTraits(alone=True, whole_batch=True, critic=True))
def gae(table: TokenTable, *, discount: Share = 1.0, gae_lambda: Share = 1.0) -> Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438), whitened over the batch as PPO implementations do."""
    return whiten(table.share * gae_raw(table, discount=discount, gae_lambda=gae_lambda))


def gae_raw(table: TokenTable, *, discount: Share, gae_lambda: Share) -> Tensor:
    """Return GAE before whitening: d_t = r_t + gamma V_(t+1) - V_t; A_t = d_t + gamma lambda A_(t+1); V is 0 after the
    last token. The critic's target is this plus V."""
    values, tokens = table.column("values"), table.turns.tokens()
    delta = table.turns.token_rewards() + discount * tokens.after(values) - values
    return tokens.to_go(delta, discount * gae_lambda)


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return max((V - G)^2, (clip(V, V_before - c, V_before + c) - G)^2) / 2, [T]: PPO2's clipped value loss (OpenAI
    baselines, ppo2/model.py; verl, core_algos.compute_value_loss). Without a clip it is (V - G)^2 / 2."""
    error = (values - returns) ** 2
    if clip is not None:
        near = values.maximum(before - clip).minimum(before + clip)
        error = error.maximum((near - returns) ** 2)
    return error / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(G - V) / Var(G): 1 if the values are right, 0 if a constant would do as well, negative if it would
    do better; 0 if the returns do not vary."""
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())
