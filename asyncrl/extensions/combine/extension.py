"""What this folder adds: four rewards whose params name other rewards."""

from __future__ import annotations

from asyncrl import extension


class Combine(extension.Extension):
    """Rewards of rewards."""

    rewards = {  # noqa: RUF012
        "weighted": "asyncrl.extensions.combine.combine:WeightedReward",
        "gate": "asyncrl.extensions.combine.combine:GatedReward",
        "process": "asyncrl.extensions.combine.process:ProcessReward",
        "cached": "asyncrl.extensions.combine.cache:CachedReward",
    }


Own = Combine
