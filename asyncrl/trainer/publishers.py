"""Construction of the publisher of a trainer rank: of all weights, or of versions that are adapters of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from asyncrl import extension
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import Config, on_gpu
from asyncrl.engine.adapters import AdapterName, adapter_names
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.network.addresses import Addresses
from asyncrl.parallel import Parallel
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.loop import VersionPublisher
from asyncrl.trainer.parallel import host_group
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.recordings import NoEngines
from asyncrl.trainer.turns import free
from asyncrl.weights.adapters import AdapterPublisher, build_adapters
from asyncrl.weights.files import folder_in
from asyncrl.weights.past import PastAdapters
from asyncrl.weights.peft_config import user_config
from asyncrl.weights.publish import Publisher, build_transport


@dataclass(frozen=True)
class PublisherBuilder:
    """What the publishers of one rank have in common."""

    config: Config
    addresses: Addresses
    run_dir: Path
    parallel: Parallel
    policy: Policy
    fleet: Fleet
    source: BatchSource
    timeout: float
    """Seconds, of collectives."""

    def publisher(self, update: Update | None) -> tuple[VersionPublisher, str]:
        """Return the publisher and the reason for its choice of transport. `update` is the protocol of engines that
        share their GPUs with trainers, on rank 0."""
        if not self.config.generates:
            publisher = NoEngines(self.source.announce, first=self.parallel.is_first)
            return publisher, f"none (mode={self.config.mode})"
        if names := adapter_names(self.config, self.addresses.run_id):
            return self._of_adapters(names)
        (merged,) = self.config.adapters
        return self._of_weights(hold=self.source.hold, announce=self.source.announce, update=update, merged=merged)

    def _of_adapters(self, names: AdapterName) -> tuple[VersionPublisher, str]:
        """Return a publisher of versions as adapters. Engines that did not load this base from the model folder get it
        from the trainers."""
        make, why = build_adapters(self.config, self.fleet, host=os.environ["ASYNCRL_HOST"], folder=self._folder())

        def base(update: Update) -> Publisher:
            return self._of_weights(hold=lambda: None, announce=lambda _: None, update=update, merged=None)[0]

        publisher = AdapterPublisher(
            self.parallel,
            self.fleet,
            {name: partial(self.policy.weights.adapters, name) for name in self.config.adapters},
            make,
            self.config.weights,
            getattr(torch, self.config.engine.dtype),
            names=names,
            announce=self.source.announce,
            base=base if self.addresses.attached or self._changes_base else None,
            past=self._past() if self.config.agents.past else None,
        )
        return publisher, why

    @property
    def _changes_base(self) -> bool:
        """Return whether the engines' base is not that of the model folder."""
        return self.config.trainer.lora.base != "none" or extension.needs_weights(self.config)

    def _past(self) -> PastAdapters:
        """Return the folders of past versions that play roles."""
        config, resume = self.config, self.addresses.resume
        origin = resume.parent.parent if resume and resume.parent.parent != self.run_dir else None
        return PastAdapters(
            self.run_dir,
            origin,
            needed=config.past_versions,
            checkpoints=CheckpointStore(self.run_dir).begun,
            describe=lambda tensors: user_config(config.trainer.lora, tensors, str(self.addresses.model)),
        )

    def _of_weights(
        self,
        *,
        hold: Callable[[], None],
        announce: Callable[[int], object],
        update: Update | None,
        merged: str | None,
    ) -> tuple[Publisher, str]:
        """Return a publisher of all weights, with an adapter merged into them or without, and the reason for its
        transport."""
        config, policy, gpus = self.config, self.policy, self.addresses.gpus
        weights = policy.sent()
        transport, why = build_transport(
            config,
            self.fleet,
            host=os.environ["ASYNCRL_HOST"],
            alone=_alone(),
            stage=self.parallel.pp_rank,
            gpu=on_gpu(config.trainer, gpus),
            folder=self._folder(),
        )
        publisher = Publisher(
            self.parallel,
            self.fleet,
            transport,
            weights,
            config.weights,
            expected=lambda: weights.checksums(
                policy.hf,
                config.engine.parallel,
                dtype=getattr(torch, config.engine.dtype),
                device="cuda" if on_gpu(config.engine, gpus) else "cpu",
            ),
            hold=hold,
            announce=announce,
            update=update,
            sent=partial(free, policy.memory) if config.cluster.takes_turns else lambda: None,
            merged=merged,
            group=host_group(self.timeout) if config.weights.overlap else None,
        )
        publisher.prepare()
        return publisher, why

    def _folder(self) -> Path:
        """Return a folder that belongs to this run alone, because several runs may share `weights.folder`."""
        if shared := self.config.weights.folder:
            return folder_in(Path(shared).expanduser(), self.run_dir)
        return self.run_dir / "weights"


def _alone() -> bool:
    """Return whether all trainer ranks are on this machine."""
    return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
