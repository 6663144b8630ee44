"""Trainers that start again after one of them died, while engines and rollouts work.

    the newest checkpoint -> the batches since then, from the journal (rollout/journal.py) -> the version that is served

The batches give the same weights again. Until the version that the engines serve is reached, nothing is published, no
checkpoint is due, and no line of metrics.jsonl is written twice. That version is then published, which also ends an
update in which the trainers died, and the batch that was in training is trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.errors import EngineError
from asyncrl.jsonl import Tail
from asyncrl.network.addresses import TRAINING, times_out_of_memory, times_restarted
from asyncrl.parallel import from_first
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.weights.checksum import QUESTION, Checksums, differing, parse
from asyncrl.weights.publish import UNSENT, Staged, StagedPublisher

if TYPE_CHECKING:
    from asyncrl.trainer.rank import Rank


def adapted(config: Config, run_dir: Path) -> tuple[Config, str]:
    """Return the settings of trainers that were out of memory, and what changed: from the second time on half as many
    tokens in a micro-batch, from the third time on all activations are recomputed. A run that resumes keeps them."""
    times = times_out_of_memory(run_dir)
    trainer = config.trainer
    if times < 2:
        return config, ""
    half = max(1, trainer.micro_batch_tokens // 2)
    changed: dict[str, Any] = {"micro_batch_tokens": half}
    reason = f"out of memory {times} times: trainer.micro_batch_tokens={half} instead of {trainer.micro_batch_tokens}"
    if times > 2 and trainer.recompute.granularity != "full":
        changed["recompute"] = trainer.recompute.model_copy(update={"granularity": "full"})
        reason += f", trainer.recompute.granularity=full instead of {trainer.recompute.granularity}"
    return config.model_copy(update={"trainer": trainer.model_copy(update=changed)}), reason


@dataclass(frozen=True)
class Recovery:
    """Where trainers that start again go on."""

    served: int
    """The version that the engines serve."""
    written: int
    """The newest step in metrics.jsonl."""
    updating: bool
    """Whether the trainers died within an update, so that engines may hold parts of a version, or none of its weights
    while trainers use their GPUs."""
    began: float
    """When they died, in seconds since the epoch."""


def find_start(rank: Rank, source: BatchSource, fleet: Fleet) -> Start:
    """Return where the trainers begin: after a checkpoint, of this run or of the one that it resumes, or at the
    source's first batch. Those that were started again take the fleet over. Collective."""
    checkpoint, recovered = rank.addresses.resume, None
    if times_restarted():
        if rank.parallel.is_first:
            newest = CheckpointStore(rank.run_dir).newest(lambda text: rank.warn(text, 0))
            checkpoint = newest[0] if newest else checkpoint
            recovered = _recovery(rank, source, fleet)
        checkpoint, recovered = from_first((checkpoint, recovered))
    return Start(manifest.read(checkpoint).version if checkpoint else source.first, checkpoint, recovered)


def _recovery(rank: Rank, source: BatchSource, fleet: Fleet) -> Recovery:
    fleet.inherit()
    status, lines = source.status(), Tail(rank.run_dir / "metrics.jsonl")()
    return Recovery(
        served=status["version"],
        written=max((int(line["version"]) for line in lines), default=0),
        updating=bool(status["held"]) or (rank.run_dir / TRAINING).exists(),
        began=float(os.environ["ASYNCRL_DIED_AT"]),
    )


@dataclass(frozen=True)
class Start:
    """Where the trainers begin."""

    version: int
    checkpoint: Path | None
    """None: they begin with the weights of the model folder."""
    recovered: Recovery | None

    @property
    def written(self) -> int:
        """Return the newest step in metrics.jsonl."""
        return self.recovered.written if self.recovered else self.version if self.checkpoint else 0

    def was_saved(self, version: int) -> bool:
        """Return whether trainers that died went on from this version, so that a checkpoint was due then."""
        return self.recovered is not None and version <= self.recovered.served


class CatchingUp(StagedPublisher):
    """Publisher of trainers that start again, which publishes nothing before the version that the engines serve."""

    def __init__(
        self, inner: StagedPublisher, start: Start, fleet: Fleet, tell: Callable[[str, int], None] | None
    ) -> None:
        """`tell`, on rank 0 alone, gets what came of the recovery."""
        assert start.recovered
        self._inner = inner
        self._first = start.version
        self._recovery = start.recovered
        self._fleet = fleet
        self._tell = tell
        self._held: Checksums | None = None

    def stage(self, version: int) -> Staged:
        """Stage a version, unless it is an earlier one than the engines serve."""
        if version < self._recovery.served:
            return Staged(version, UNSENT)
        if self._tell and version == self._recovery.served:
            self._held = self._checksums_held()
        return self._inner.stage(version)

    def complete(self, staged: Staged) -> dict[str, float]:
        """Complete it, and tell of the first one."""
        if staged.version < self._recovery.served:
            return staged.metrics
        metrics = self._inner.complete(staged)
        if self._tell and staged.version == self._recovery.served:
            seconds = time.time() - self._recovery.began
            trained = f"{staged.version - self._first} steps since version {self._first} were trained again"
            compared = self._compared(self._held)
            self._tell(f"the trainers go on after {seconds:.0f} s: {trained}; {compared}", staged.version)
            self._tell = None
        return metrics

    def _checksums_held(self) -> Checksums | None:
        """Return the checksums of the weights that an engine holds, unless they may be parts of a version."""
        if self._recovery.updating or not self._fleet.serving:
            return None
        try:
            return parse(self._fleet.post(self._fleet.serving[0], *QUESTION))
        except EngineError:
            return None

    def _compared(self, held: Checksums | None) -> str:
        sent = self._inner.verified
        if held is None or sent is None:
            return "the weights were not compared"
        wrong = differing(sent, held)
        return f"{len(wrong)} tensors differ from those that were served" if wrong else "the weights are the same"
