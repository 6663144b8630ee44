"""The training loop, on every rank: the algorithm on one screen.

produces      versions: batch v turns version v into version v + 1, which every engine then serves
consumes      batches, whose staleness the rollout side has already bounded
waits for     the rollout process (batches.get), the engines (publisher.publish)
unblocked by  generation, which waits for this loop only at the staleness bound
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.metrics.record import StepLog
from asyncrl.schema import Batch
from asyncrl.trainer.feed import BatchFeed
from asyncrl.trainer.stop import StopRule
from asyncrl.weights.publish import VersionPublisher

ASKED = "asked to stop; to be resumed"
"""Reason of a run that is paused, not finished."""


def train(
    update: Callable[[Batch], dict[str, float]],
    batches: BatchFeed,
    publisher: VersionPublisher,
    log: StepLog,
    stop: StopRule,
    *,
    save: Callable[[int], None],
    version: int = 0,
) -> tuple[str, int]:
    """Train from `version` on until a stop rule holds. A batch may come in parts; `update` returns the statistics with
    the last one. Returns the reason and the last version."""
    if version and (reason := stop.at(version)):
        return reason, version  # the run was killed after its last step and then resumed
    while True:
        parts: list[Batch] = []
        while not parts or not parts[-1].last:
            with log.span("wait_batch"):
                while (part := batches.get(version, len(parts))) is None:
                    if batches.stopped:
                        return ASKED, version
                    publisher.publish(version)  # engines that restarted hold no weights, and no other engine serves
            with log.span("train"):
                metrics = update(part)
            parts.append(part)
        batch = Batch(version, [group for one in parts for group in one.groups], parts[-1].rollout)

        version += 1
        with log.span("publish"):
            sent = publisher.publish(version)

        step = log.step(version, batch, metrics, sent)
        save(version)
        if reason := stop.reason(step):
            return reason, version
