"""Advantages of episodes and of steps: GiGPO, arXiv 2505.10978."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algo.advantage import EPSILON, centred, standardised
from asyncrl.settings import NonNegative, Share

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TokenTable


def gigpo(table: TokenTable, *, discount: Share = 1.0, step_weight: NonNegative = 1.0) -> Tensor:
    """Return (R - mean) / std of the episode, plus `step_weight` times the same of the discounted returns over all
    turns of the group in one state: GiGPO, arXiv 2505.10978, equations 3 to 8. A turn alone in its state has only the
    first term.

    Equals verl-agent's gigpo/core_gigpo.py with mean_std_norm, except that a single episode has no advantage, and that
    the episode's mean is over episodes, as in the paper, not over all their turns.
    """
    return _gigpo(table, discount, step_weight, scale=True)


def dr_gigpo(table: TokenTable, *, discount: Share = 1.0, step_weight: NonNegative = 1.0) -> Tensor:
    """Return GiGPO's advantages without the division: the paper's F_norm = 1, verl-agent's mean_norm."""
    return _gigpo(table, discount, step_weight, scale=False)


def _gigpo(table: TokenTable, discount: float, step_weight: float, *, scale: bool) -> Tensor:
    groups, turns = table.groups, table.turns
    episode = groups.rewards - groups.mean()
    episode = groups.spread(episode / (groups.deviation() + EPSILON) if scale else episode)
    to_go = turns.to_go(turns.turn_rewards(), discount)
    step = standardised(to_go, turns.state) if scale else centred(to_go, turns.state)
    return episode + step_weight * (turns.share * step)[turns.of_token]
