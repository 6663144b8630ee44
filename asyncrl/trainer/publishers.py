"""Construction of the publisher of a trainer rank: of all weights, or of versions that are adapters of their own, and
what works around it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from asyncrl import lookup
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import on_gpu
from asyncrl.engine.adapters import AdapterName, adapter_names
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import RolloutSide, Update
from asyncrl.metrics.record import StepLog
from asyncrl.observability.timeline import Phases
from asyncrl.parallel import Parallel
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.gpu_sharing import GpuSharing
from asyncrl.trainer.parallel import host_group
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.rank import Rank
from asyncrl.trainer.recovery import CatchingUp, Start
from asyncrl.weights.adapters import AdapterPublisher, PastAdapters, build_adapters
from asyncrl.weights.background import Background
from asyncrl.weights.disk import publish_folder
from asyncrl.weights.peft_config import user_config
from asyncrl.weights.publish import UNSENT, Outgoing, Publisher, Staged, StagedPublisher, VersionPublisher
from asyncrl.weights.transports import build_transport


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
    builder = _Builder(rank, policy, fleet, source)
    sender: StagedPublisher
    if names := adapter_names(config, rank.addresses.run_id):
        sender, why = builder.of_adapters(names)
    else:
        sender, why = builder.of_weights(source, sharing.update, sharing.sent)
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
class _Builder:
    """What the publishers of one rank that send something have in common."""

    rank: Rank
    policy: Policy
    fleet: Fleet
    source: BatchSource

    def of_adapters(self, names: AdapterName) -> tuple[AdapterPublisher, str]:
        """Return a publisher of versions as adapters. Engines that did not load this base from the model folder get it
        from the trainers."""
        config = self.rank.config
        make, why = build_adapters(config, self.fleet, host=os.environ["ASYNCRL_HOST"], folder=self._folder)
        other_base = config.trainer.lora.base != "none" or lookup.needs_weights(config)
        publisher = AdapterPublisher(
            self.rank.parallel,
            self.fleet,
            {name: partial(self._adapter, name) for name in config.agents.adapters},
            make,
            config.weights,
            names=names,
            announce=self.source.announce,
            past=self._past(),
            base=self._base if self.rank.addresses.attached or other_base else None,
        )
        return publisher, why

    def of_weights(
        self,
        rollout: RolloutSide,
        update: Update | None,
        sent: Callable[[], None] = lambda: None,
        *,
        base: bool = False,
    ) -> tuple[StagedPublisher, str]:
        """Return a publisher of all weights, or of the base alone, and the reason for its transport. `update` is the
        protocol, if the engines need another than usual, and `sent` is called before they continue."""
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
            folder=self._folder,
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
            Outgoing(weights, expected, merged=None if base else config.agents.adapters[0]),
            config.weights,
            rollout,
            host_group(rank.timeout) if config.weights.overlap else None,
            sent=sent,
        )
        return publisher, why

    def _base(self, update: Update) -> StagedPublisher:
        return self.of_weights(RolloutSide(), update, base=True)[0]

    def _adapter(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield an adapter's tensors as the engines get them."""
        dtype = getattr(torch, self.rank.config.engine.dtype)
        return ((tensor, value.to(dtype)) for tensor, value in self.policy.weights.adapters(name))

    def _past(self) -> PastAdapters:
        """Return the folders of past versions that play roles."""
        config, run_dir, addresses = self.rank.config, self.rank.run_dir, self.rank.addresses
        resume = addresses.resume
        return PastAdapters(
            run_dir,
            resume.parent.parent if resume and resume.parent.parent != run_dir else None,
            needed=config.past_versions,
            checkpoints=CheckpointStore(run_dir).begun,
            describe=lambda tensors: user_config(config.trainer.lora, tensors, str(addresses.model)),
        )

    @property
    def _folder(self) -> Path:
        return publish_folder(self.rank.config.weights.folder, self.rank.run_dir)
