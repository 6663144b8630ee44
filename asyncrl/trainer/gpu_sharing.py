"""How a trainer rank and engines use the same GPU: side by side here, in other ways by extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from asyncrl import lookup
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.metrics.record import StepLog
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.rank import Rank
from asyncrl.user_code import load
from asyncrl.weights.publish import StagedPublisher, VersionPublisher

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy


class GpuSharing:
    """How a rank shares its GPU, if it does: both use it all the time. Extensions offer subclasses for other values of
    cluster.placement (Extension.placements)."""

    update: Update | None = None
    """The protocol by which rank 0 updates the engines, if they need another than usual."""

    def __init__(self, rank: Rank, fleet: Fleet) -> None:
        """Wait for engines that use the trainers' GPUs: they have measured the memory, so that this rank may use its
        GPU. Called on every rank before it does so."""
        if rank.config.cluster.shares_gpus:
            if rank.parallel.is_first:
                rank.wait_for_engines()
            dist.barrier()

    def sent(self) -> None:
        """Act when every engine has received its weights, before it continues. Called on every rank."""

    def around(self, publisher: StagedPublisher, policy: Policy, source: BatchSource, log: StepLog) -> VersionPublisher:
        """Return what works around the publisher of all weights. Called once, before a checkpoint is loaded."""
        return publisher


def share_gpu(rank: Rank, fleet: Fleet) -> GpuSharing:
    """Return how this rank shares its GPU, once it may use it. Collective."""
    placement = rank.config.cluster.placement
    path = lookup.offered("placements", rank.config.extensions).get(placement)
    kind = load(path, "cluster.placement") if path else GpuSharing
    sharing: GpuSharing = kind(rank, fleet)
    return sharing
