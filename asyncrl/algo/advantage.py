"""Group-relative advantages: from the rewards of one group to one number per sample.

Standard deviations are unbiased (ddof 1) and EPSILON is added to them, as slime and verl do. A group without
differences, or with a single member, has advantages of zero: it carries no signal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

EPSILON = 1e-6

Advantage = Callable[[list[float]], list[float]]


def grpo(rewards: list[float]) -> list[float]:
    """(R - mean) / (std + EPSILON): GRPO, arXiv 2402.03300, section 4.1.2."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]


def dr_grpo(rewards: list[float]) -> list[float]:
    """R - mean: Dr. GRPO, arXiv 2503.20783, which drops the division for its bias towards easy and hard prompts."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}
