"""Rewards, which score episodes: matching, math, code, reward models, judges and combinations (docs/rewards.md).

A run names a reward by `use` and `params`; `build` creates it. A user's own reward is a function (text, record) ->
float, sync or async, named by its import path.
"""

from __future__ import annotations

from asyncrl.rewards.build import build
from asyncrl.rewards.reward import Reward, RewardInput, Score

__all__ = ["Reward", "RewardInput", "Score", "build"]
