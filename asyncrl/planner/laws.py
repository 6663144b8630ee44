"""What bounds throughput, by arithmetic: the trainer's law, the engines' law, and the better of their splits.

With everything busy all the time X tokens per second cannot exceed

    trainer     tokens / (tokens / rate + fixed)           tokens of a batch
    engines     engines * C / (per_token + per_request * C)        C requests in each batch
"""

from __future__ import annotations

from asyncrl.planner.engine import EngineShape


def trainer_law(rate: float, fixed: float, batch_tokens: float) -> float:
    """Tokens per second of a trainer that never waits."""
    return batch_tokens / (batch_tokens / rate + fixed)


def engines_law(engines: int, shape: EngineShape) -> float:
    """Tokens per second of engines whose batches are always full."""
    return engines * shape.rate(shape.max_running)


def bottleneck_bound(
    devices: int, shape: EngineShape, rate_per_device: float, fixed: float, batch_tokens: float
) -> tuple[float, int]:
    """Tokens per second that no asynchronous run on so many devices exceeds, and the number of engines that allows
    it; each device is an engine or a part of the trainer."""
    return max(
        (
            min(
                engines_law(engines, shape),
                trainer_law(rate_per_device * (devices - engines), fixed, batch_tokens),
            ),
            engines,
        )
        for engines in range(1, devices)
    )
