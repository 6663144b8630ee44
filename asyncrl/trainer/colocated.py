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
from pathlib import Path

import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.hand_over import HandOver
from asyncrl.metrics.record import StepLog
from asyncrl.parallel import Parallel
from asyncrl.trainer.batch_source import wait_until_ready
from asyncrl.trainer.offload import DeviceMemory
from asyncrl.weights.publish import StagedPublisher, VersionPublisher


def free(memory: DeviceMemory) -> None:
    """Free the GPUs of all ranks for the engines' caches, after every engine has received its weights."""
    memory.offload(parameters=True)
    dist.barrier()


class Colocated(VersionPublisher):
    """The publisher of a rank whose GPU engines use, too. It begins with the GPU: the engines have released their
    memory."""

    def __init__(
        self, inner: StagedPublisher, memory: DeviceMemory, log: StepLog, release: Callable[[], None] = lambda: None
    ) -> None:
        """`release`, on rank 0, makes the rollout side hold requests back, and the engines release their memory."""
        self._inner = inner
        self._memory = memory
        self._log = log
        self._release = release
        self._ours = True

    def take_back(self) -> None:
        """Wait until no engine uses the GPUs."""
        with self._log.span("release"):
            self._release()
            dist.barrier()
        self._ours = True

    @contextmanager
    def training(self) -> Iterator[None]:
        """Have everything on the device inside the block, and afterwards only the parameters."""
        self._memory.onload(everything=True)
        yield
        self._memory.offload(parameters=False)

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version, and give the GPUs back to the engines. Without a batch before it, as after all engines
        were restarted, the engines release their memory first."""
        if not self._ours:
            self.take_back()
        self._memory.offload(parameters=False)  # after the start or a checkpoint was loaded
        self._memory.onload(everything=False)
        sent = self._inner.publish(version)
        self._ours = False
        return sent

    @contextmanager
    def parameters(self, version: int) -> Iterator[None]:
        """Have the parameters on the device inside the block, between two batches; then publish the version again."""
        self.take_back()
        self._memory.onload(everything=False)
        yield
        self.publish(version)


def wait_for_engines(config: Config, run_dir: Path, fleet: Fleet, parallel: Parallel) -> HandOver | None:
    """Wait for engines that use the trainers' GPUs: they have measured the memory, so that this rank may use its GPU.
    Return, on rank 0, the hand-over of those that do so in turns, which have released their memory."""
    if not config.cluster.shares_gpus:
        return None
    hand_over = None
    if parallel.is_first:
        timeout = config.engine.start_timeout
        wait_until_ready(run_dir, timeout)
        if config.cluster.takes_turns:
            hand_over = HandOver(fleet, mode=config.weights.pause_mode, start_timeout=timeout, folder=run_dir)
            hand_over.give()
    dist.barrier()
    return hand_over
