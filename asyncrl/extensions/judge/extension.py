"""What this folder adds: three rewards."""

from __future__ import annotations

from asyncrl import extension


class Judges(extension.Extension):
    """Other models score the answers."""

    rewards = {  # noqa: RUF012
        "remote": "asyncrl.extensions.judge.remote:RewardModel",
        "judge": "asyncrl.extensions.judge.judge:JudgeReward",
        "rubric": "asyncrl.extensions.judge.rubric:RubricReward",
    }


Own = Judges
