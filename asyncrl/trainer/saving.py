"""What is kept of a run after its steps: checkpoints, and exports of the weights."""

from __future__ import annotations

from asyncrl.metrics.record import StepLog
from asyncrl.trainer.checkpoint import Checkpoints
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.rank import Rank
from asyncrl.trainer.recovery import Start
from asyncrl.weights.export import save_trained
from asyncrl.weights.publisher import VersionPublisher


class Saving:
    """Saves what is due on one rank."""

    def __init__(
        self,
        rank: Rank,
        policy: Policy,
        publisher: VersionPublisher,
        checkpoints: Checkpoints,
        log: StepLog,
        start: Start,
    ) -> None:
        self._rank = rank
        self._policy = policy
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._log = log
        self._start = start

    def after_step(self, version: int) -> None:
        """Save what is due at this version."""
        every = self._rank.config.trainer.save_hf_every
        if every and version % every == 0:
            self._export(f"hf-{version:06d}", version)
        if self._checkpoints.due(version) and not self._start.was_saved(version):
            with self._log.span("save"):
                self._publisher.finish()  # the rollout side is saved between a version and its batch
                self._checkpoints.save(version)

    def at_the_end(self, version: int, *, export: bool) -> None:
        """Save the last version, and export it unless the run is to be resumed."""
        self._publisher.finish()
        self._checkpoints.save(version)
        if export:
            self._export("hf", version)
        self._checkpoints.finish()

    def _export(self, name: str, version: int) -> None:
        """Save the weights as an HF folder, or as PEFT folders of adapters."""
        rank, config = self._rank, self._rank.config
        with self._publisher.parameters(version):
            save_trained(
                rank.run_dir / name,
                rank.addresses.model,
                self._policy.weights,
                rank.parallel,
                config.trainer,
                config.adapters,
            )
