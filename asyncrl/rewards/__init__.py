"""What scores an episode: matching, mathematics, code, reward models, judges, and what combines them (docs/rewards.md).

A run names a reward by `use` and `params`; `build` makes it. One of your own is a function (text, record) -> float,
sync or async, by import path.
"""

from __future__ import annotations

from asyncrl.rewards.build import build
from asyncrl.rewards.reward import Answer, Reward, Score

__all__ = ["Answer", "Reward", "Score", "build"]
