"""Construction of the publisher of a trainer rank, of all weights or that of an extension, and what works around it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from asyncrl.config import on_gpu
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import RolloutSide, Update
from asyncrl.metrics.record import StepLog
from asyncrl.observability.timeline import Phases
from asyncrl.parallel import Parallel
from asyncrl.schema import POLICY
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.gpu_sharing import GpuSharing
from asyncrl.trainer.parallel import host_group
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.rank import Rank
from asyncrl.trainer.recovery import CatchingUp, Start
from asyncrl.weights.background import Background
from asyncrl.weights.publish import UNSENT, Outgoing, Publisher, Staged, StagedPublisher, VersionPublisher
from asyncrl.weights.transports import build_transport, publish_folder


def build_publisher(
    rank: Rank,
    policy: Policy,
    fleet: Fleet,
    source: BatchSource,
    sharing: GpuSharing,
    log: StepLog,
    start: Start,
) -> tuple[VersionPublisher, str]:
    """Return the publisher of a run, and the reason for its choice of transport."""
    config = rank.config
    publishing = Publishing(rank, policy, fleet, source)
    sender, why = policy.publisher(publishing) or publishing.of_weights(source, sharing.update, sharing.sent)
    if start.recovered:
        died = start.recovered.began

        def tell(text: str, version: int) -> None:
            rank.warn(text, version)
            rank.phases("recovery", version, died, time.time())

        sender = CatchingUp(sender, start, fleet, tell if rank.parallel.is_first else None)
    if config.weights.overlap:
        return in_background(sender, rank.phases, rank.parallel), why
    return sharing.around(sender, policy, source, log), why


class NoEngines(StagedPublisher):
    """Publisher for a run in which nothing generates."""

    def __init__(self, announce: Callable[[int], object], *, first: bool) -> None:
        """`first` is True on rank 0, which alone announces versions."""
        self._announce = announce
        self._first = first

    def stage(self, version: int) -> Staged:
        """Copy no weights."""
        return Staged(version, UNSENT)

    def complete(self, staged: Staged) -> dict[str, float]:
        """Announce the version."""
        if self._first:
            self._announce(staged.version)
        return staged.metrics


def in_background(publisher: StagedPublisher, phases: Phases, parallel: Parallel) -> Background:
    """Return a publisher that works in the background. If it fails on another rank than 0, whose loop raises the error
    while it waits for a batch, that rank ends, because it may be waiting for rank 0 in a collective."""

    def leave(error: BaseException) -> None:
        if not parallel.is_first:
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    return Background(publisher, ended=partial(phases, thread="publish"), failed=leave)


@dataclass(frozen=True)
class Publishing:
    """What the publishers of one rank have in common."""

    rank: Rank
    policy: Policy
    fleet: Fleet
    source: BatchSource

    def of_weights(
        self,
        rollout: RolloutSide,
        update: Update | None,
        sent: Callable[[], None] = lambda: None,
        *,
        merged: str | None = POLICY,
    ) -> tuple[StagedPublisher, str]:
        """Return a publisher of all weights, with what the model `merged` adds to them, and the reason for its
        transport. `update` is the protocol, if the engines need another than usual, and `sent` is called before they
        continue."""
        rank, config, policy = self.rank, self.rank.config, self.policy
        if not config.generates:
            return NoEngines(self.source.announce, first=rank.parallel.is_first), f"none (mode={config.mode})"
        weights, gpus = policy.sent(), rank.addresses.gpus
        transport, why = build_transport(
            config,
            self.fleet,
            host=os.environ["ASYNCRL_HOST"],
            alone=os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"],
            stage=rank.parallel.pp_rank,
            gpu=on_gpu(config.trainer, gpus),
            folder=self.folder,
        )
        expected = partial(
            weights.checksums,
            policy.hf,
            config.engine.parallel,
            dtype=getattr(torch, config.engine.dtype),
            device="cuda" if on_gpu(config.engine, gpus) else "cpu",
        )
        publisher = Publisher(
            rank.parallel,
            update or Update(self.fleet, mode=config.weights.pause_mode),
            transport,
            Outgoing(weights, expected, merged),
            config.weights,
            rollout,
            host_group(rank.timeout) if config.weights.overlap else None,
            sent=sent,
        )
        return publisher, why

    @property
    def folder(self) -> Path:
        """Return the folder for files that all engines see."""
        return publish_folder(self.rank.config.weights.folder, self.rank.run_dir)
