"""Reward shaping, applied before advantages are computed. A run's reward statistics stay those of the task.

The steps are applied in this order, each only if its setting enables it: the penalty for an answer near the length
limit, the length penalty, the clip, the normalization. Rewards of single turns and tokens are unchanged. For an episode
with several answers, the first uses the longest one and the second their sum (the mean over branches if it forks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable

if TYPE_CHECKING:
    from asyncrl.config import ShapingConfig

EPSILON = 1e-6


def shaped(table: TokenTable, settings: ShapingConfig, longest: int) -> Tensor:
    """Return the shaped rewards of the episodes, [E]; `longest` is the length limit of an answer in tokens."""
    reward = table.reward
    if settings.overlong_buffer is not None:
        reward = reward + settings.overlong_penalty * overlong(_longest(table), settings.overlong_buffer, longest)
    reward = reward - settings.length_penalty * table.sum_per_episode(table.share) / longest
    if settings.clip is not None:
        reward = reward.clamp(-settings.clip, settings.clip)
    return normalised(reward) if settings.normalize else reward


def overlong(lengths: Tensor, buffer: int, longest: int) -> Tensor:
    """Return 0 up to longest - buffer tokens, then a linear decrease to -1 at `longest`, and no less: the soft overlong
    punishment of DAPO, arXiv 2503.14476, equation 13. Lengths count tokens that the policy wrote. [E] -> [E]."""
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def _longest(table: TokenTable) -> Tensor:
    """Return the number of tokens of the longest turn, [E]."""
    turns = table.turns
    lengths = (turns.last - turns.first + 1).to(table.reward.dtype)
    return torch.zeros_like(table.reward).scatter_reduce(0, turns.owner, lengths, "amax")


def normalised(reward: Tensor) -> Tensor:
    """Normalize to mean 0 and standard deviation 1 (unbiased, plus EPSILON) over the episodes of the batch, or to 0 if
    all are equal: batch-level reward normalization, as in AReaL and ROLL. Followed by dr_grpo it is TRL's
    scale_rewards=batch. No running statistic is used, so that a step depends only on its batch and its weights. [E] ->
    [E]."""
    if len(reward) < 2 or bool((reward == reward[0]).all()):
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std() + EPSILON)


def trainable(table: TokenTable, settings: ShapingConfig) -> Tensor:
    """Return [N] bool, False for the tokens of truncated answers if `mask_truncated` is set (overlong filtering, DAPO,
    section 3.4; TRL's mask_truncated_completions). Their rewards still count for their siblings, and the tokens for the
    denominator (TRL removes them from it)."""
    if not settings.mask_truncated:
        return torch.ones(table.num_tokens, dtype=torch.bool)
    return ~table.per_token(table.truncated)
