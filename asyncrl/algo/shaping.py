"""What the rewards of a batch become before advantages are made of them. The figures of a run stay those of the task.

Applied in this order, each only where its setting asks for it: the penalty of an answer that nears the limit, that of
every token, the clip, the normalisation. Rewards of single turns and tokens stay as they are. Of an episode with
several answers the first goes by the longest, and the second adds up over them (over a mean way, where it forks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable
from asyncrl.algo.turns import turns_of

EPSILON = 1e-6


@dataclass(frozen=True)
class ShapingParams:
    """Which of them are on, and their numbers."""

    overlong_buffer: int | None = None  # tokens below the limit where the penalty begins
    overlong_penalty: float = 1.0  # at the limit
    length_penalty: float = 0.0  # of an answer of full length
    reward_clip: float | None = None
    normalize_rewards: bool = False
    mask_truncated: bool = False


def shaped(table: TokenTable, params: ShapingParams, longest: int) -> Tensor:
    """[E] rewards of episodes; `longest` is the limit of an answer in tokens."""
    reward = table.reward
    if params.overlong_buffer is not None:
        reward = reward + params.overlong_penalty * overlong(_longest(table), params.overlong_buffer, longest)
    reward = reward - params.length_penalty * table.sum_per_episode(table.share) / longest
    if params.reward_clip is not None:
        reward = reward.clamp(-params.reward_clip, params.reward_clip)
    return normalised(reward) if params.normalize_rewards else reward


def overlong(lengths: Tensor, buffer: int, longest: int) -> Tensor:
    """0 up to longest - buffer tokens, from there linearly to -1 at `longest`, and no lower: the soft overlong
    punishment of DAPO, arXiv 2503.14476, equation 13. Lengths are in tokens that the policy wrote. [E] -> [E]."""
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def _longest(table: TokenTable) -> Tensor:
    """[E] tokens of the longest turn."""
    turns = turns_of(table)
    lengths = (turns.last - turns.first + 1).to(table.reward.dtype)
    return torch.zeros_like(table.reward).scatter_reduce(0, turns.owner, lengths, "amax")


def normalised(reward: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (unbiased, plus EPSILON) over the episodes of the batch; 0 where all are equal:
    reward normalisation at batch level, as in AReaL and ROLL; followed by dr_grpo it is TRL's scale_rewards=batch. Not
    a running figure: a step is made of its batch and its weights alone. [E] -> [E]."""
    if len(reward) < 2 or bool((reward == reward[0]).all()):
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std() + EPSILON)


def trainable(table: TokenTable, params: ShapingParams) -> Tensor:
    """[N] bool, False for the tokens of truncated answers where `mask_truncated` is set (overlong filtering, DAPO,
    section 3.4; TRL's mask_truncated_completions). Their rewards count for their siblings, and they themselves for the
    denominator (TRL takes them out of it)."""
    if not params.mask_truncated:
        return torch.ones(table.num_tokens, dtype=torch.bool)
    return ~table.per_token(table.truncated)
