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
from typing import Any

import torch.distributed as dist

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.errors import EngineError
from asyncrl.jsonl import Tail
from asyncrl.network.addresses import OUT_OF_MEMORY, times_restarted
from asyncrl.parallel import Parallel
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.loop import VersionPublisher
from asyncrl.weights.checksum import Checksums, differing, parse

UNSENT = dict.fromkeys(("fill", "pause", "verify", "bytes", "engines"), 0.0)
"""Figures of a version that is not published."""


def adapted(config: Config, run_dir: Path) -> tuple[Config, str]:
    """Return the settings of trainers that were out of memory, and what changed: from the second time on half as many
    tokens in a micro-batch, from the third time on all activations are recomputed. A run that resumes keeps them."""
    file, trainer = run_dir / OUT_OF_MEMORY, config.trainer
    times = int(file.read_text()) if file.exists() else 0
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
    """Where trainers that start again begin, and where they go on."""

    checkpoint: Path | None
    """None: they begin with the weights of the model folder, as the run did."""
    served: int
    """The version that the engines serve."""
    written: int
    """The newest step in metrics.jsonl."""
    updating: bool
    """Whether the trainers died within an update, so that engines may hold parts of a version."""
    began: float
    """When they died, in seconds since the epoch."""


def find(run_dir: Path, origin: Path | None, source: BatchSource, fleet: Fleet, parallel: Parallel) -> Recovery | None:
    """Return the recovery of trainers that were started again, after the fleet was taken over; None for the first ones
    of a run. `origin` is the checkpoint that the run itself resumed from. Collective."""
    if not times_restarted():
        return None
    recovery: list[Any] = [None]
    if parallel.is_first:
        newest = CheckpointStore(run_dir).newest(lambda text: print(f"asyncrl: {text}", flush=True))
        fleet.inherit()
        status, lines = source.status(), Tail(run_dir / "metrics.jsonl")()
        recovery[0] = Recovery(
            checkpoint=newest[0] if newest else origin,
            served=status["version"],
            written=max((int(line["version"]) for line in lines), default=0),
            updating=bool(status["held"]),
            began=float(os.environ["ASYNCRL_DIED_AT"]),
        )
    if dist.is_initialized():
        dist.broadcast_object_list(recovery, src=0)
    return recovery[0]


class CatchingUp:
    """Publisher of trainers that start again, which publishes nothing before the version that the engines serve."""

    def __init__(
        self,
        publisher: VersionPublisher,
        first: int,
        recovery: Recovery,
        fleet: Fleet,
        verified: Callable[[], Checksums | None],
        tell: Callable[[str, int], None] | None,
    ) -> None:
        """`first` is the version to begin with. `verified` returns the checksums of the weights that were published
        last, if they were computed. `tell`, on rank 0 alone, gets what came of the recovery."""
        self._publisher, self._recovery, self._fleet = publisher, recovery, fleet
        self._first, self._verified, self._tell = first, verified, tell

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version unless it is an earlier one than the engines serve."""
        if version != self._recovery.served or self._tell is None:
            return self._publisher.publish(version) if version >= self._recovery.served else UNSENT
        held = self._held()
        figures = self._publisher.publish(version)
        seconds = time.time() - self._recovery.began
        trained = f"{version - self._first} steps since version {self._first} were trained again"
        self._tell(f"the trainers go on after {seconds:.0f} s: {trained}; {self._compared(held)}", version)
        self._tell = None
        return figures

    def _held(self) -> Checksums | None:
        """Return the checksums of the weights that an engine holds, unless they may be parts of a version."""
        if self._recovery.updating or not self._fleet.serving:
            return None
        try:
            asked = {"action": "checksum", "selector": "target"}
            return parse(self._fleet.post(self._fleet.serving[0], "/weights_checker", asked))
        except EngineError:
            return None

    def _compared(self, held: Checksums | None) -> str:
        sent = self._verified()
        if held is None or sent is None:
            return "the weights were not compared"
        wrong = differing(sent, held)
        return f"{len(wrong)} tensors differ from those that were served" if wrong else "the weights are the same"
