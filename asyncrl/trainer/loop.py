"""The algorithm on one screen. Runs on every rank.

produces      versions: batch v turns version v into version v + 1, which every engine then serves
consumes      batches, whose staleness the rollout side has already bounded
waits for     the rollout process (batches.get), the engines (publisher.publish)
unblocked by  generation, which never waits for this loop beyond the staleness bound
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.metrics.record import StepLog
from asyncrl.trainer.feed import Batches
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.stop import StopRule
from asyncrl.weights.publish import Publisher


def train(
    policy: Policy,
    batches: Batches,
    publisher: Publisher,
    log: StepLog,
    stop: StopRule,
    *,
    save: Callable[[int], None],
) -> str:
    """Train until a stop rule holds; returns its reason."""
    version = 0
    while True:
        with log.span("wait_batch"):
            while (batch := batches.get(version)) is None:
                publisher.publish(version)  # the engines that came back hold no weights of ours, and no other serves

        with log.span("train"):
            figures = policy.update(batch)

        version += 1
        with log.span("publish"):
            sent = publisher.publish(version)

        step = log.step(version, batch, figures, sent)
        save(version)
        if reason := stop.reason(step):
            return reason
