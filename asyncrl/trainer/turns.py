"""The trainers' side of cluster.placement=colocated: they use the GPUs only after the engines have released their
memory, and give them back with each version.

    batch      the rollout side holds requests back, the engines release their memory           (engine/hand_over.py)
    update     everything comes to the device; afterwards all but the parameters leaves it      (offload.py)
    publish    the engines take memory for weights, which are sent; the parameters leave the device; the engines take
               their cache, and continue

waits for     the engines, with the deadlines of the hand-over; all ranks, with the process group's timeout
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from asyncrl.engine.hand_over import HandOver
from asyncrl.metrics.record import StepLog
from asyncrl.schema import Batch
from asyncrl.trainer.loop import VersionPublisher
from asyncrl.trainer.offload import DeviceMemory


def free(memory: DeviceMemory) -> None:
    """Free the GPUs of all ranks for the engines' caches, after every engine has received its weights."""
    memory.offload(parameters=True)
    dist.barrier()


class Turns:
    """The turns of one trainer rank, which begins with one: the engines have released their memory. Only rank 0 has a
    hand-over. `hold` makes the rollout side hold requests back."""

    def __init__(
        self,
        hand_over: HandOver | None,
        memory: DeviceMemory,
        publisher: VersionPublisher,
        log: StepLog,
        hold: Callable[[], None],
    ) -> None:
        self._hand_over, self._memory, self._publisher = hand_over, memory, publisher
        self._log, self._hold = log, hold
        self._ours = True

    def take_back(self) -> None:
        """Wait until no engine uses the GPUs."""
        with self._log.span("release"):
            if self._hand_over:
                self._hold()
                self._hand_over.give()
            dist.barrier()
        self._ours = True

    def update(self, update: Callable[[Batch], dict[str, float]], batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of a batch. Afterwards only the parameters are on the device."""
        self._memory.onload(everything=True)
        figures = update(batch)
        self._memory.offload(parameters=False)
        return figures

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version, and give the GPUs back to the engines. Without a batch before it, as after all engines
        were restarted, the engines release their memory first."""
        if not self._ours:
            self.take_back()
        self._memory.offload(parameters=False)  # after the start or a checkpoint was loaded
        self._memory.onload(everything=False)
        sent = self._publisher.publish(version)
        self._ours = False
        return sent

    @contextmanager
    def parameters(self, version: int) -> Iterator[None]:
        """Have the parameters on the device in this block, between two turns; then publish the version again."""
        self.take_back()
        self._memory.onload(everything=False)
        yield
        self.publish(version)
