"""Upper bounds of throughput: of the trainer, of the engines, and of the best split of devices between them.

If both are always busy, the throughput in tokens per second cannot exceed

    trainer     tokens / (tokens / rate + fixed)           tokens of a batch
    engines     engines * C / (per_token + per_request * C)        C requests in each batch
"""

from __future__ import annotations

from asyncrl.planner.engine import EngineShape


def trainer_bound(rate: float, fixed: float, batch_tokens: float) -> float:
    """Return the tokens per second of a trainer that never waits."""
    return batch_tokens / (batch_tokens / rate + fixed)


def engines_bound(engines: int, shape: EngineShape) -> float:
    """Return the tokens per second of engines whose batches are always full."""
    return engines * shape.rate(shape.max_running)


def bottleneck_bound(
    devices: int, shape: EngineShape, rate_per_device: float, fixed: float, batch_tokens: float
) -> tuple[float, int]:
    """Return the tokens per second that no asynchronous run on this many devices can exceed, and the number of engines
    that attains it. Each device is either an engine or part of the trainer."""
    return max(
        (
            min(
                engines_bound(engines, shape),
                trainer_bound(rate_per_device * (devices - engines), fixed, batch_tokens),
            ),
            engines,
        )
        for engines in range(1, devices)
    )
