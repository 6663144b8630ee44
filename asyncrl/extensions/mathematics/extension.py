"""What this folder adds: the reward `math`."""

from __future__ import annotations

from asyncrl import extension


class Mathematics(extension.Extension):
    """Answers are compared by math_verify."""

    rewards = {"math": "asyncrl.extensions.mathematics.math_reward:MathReward"}  # noqa: RUF012


Own = Mathematics
