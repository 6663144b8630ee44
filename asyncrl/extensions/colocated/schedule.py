"""The trainers' side of cluster.placement=colocated: they use the GPUs only after the engines have released their
memory, and give them back with each version.

    batch      the rollout side holds requests back, the engines release their memory               (hand_over.py)
    update     everything comes to the device; afterwards all but the parameters leaves it          (offload)
    publish    the engines take memory for weights, which are sent; the parameters leave the device; the engines take
               their cache, and continue

waits for     the engines, with the deadlines of the hand-over; all ranks, with the process group's timeout
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.extensions.colocated.hand_over import HandOver
from asyncrl.extensions.offload.device_memory import DeviceMemory, HeldTensors
from asyncrl.metrics.record import StepLog
from asyncrl.trainer.batch_source import BatchSource
from asyncrl.trainer.gpu_sharing import GpuSharing
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.rank import Rank
from asyncrl.weights.publish import StagedPublisher, VersionPublisher


class ColocatedSchedule(GpuSharing):
    """How a rank shares its GPU with engines in turns. The trainers begin."""

    _memory: DeviceMemory

    def __init__(self, rank: Rank, fleet: Fleet) -> None:
        """Wait until the engines have measured their GPUs, and have released their memory."""
        super().__init__(rank, fleet)
        if rank.parallel.is_first:
            config = rank.config
            self.update = HandOver(
                fleet,
                mode=config.weights.pause_mode,
                start_timeout=config.engine.start_timeout,
                folder=rank.run_dir,
            )
            self.update.give()
        dist.barrier()

    def sent(self) -> None:
        """Free the GPUs of all ranks for the engines' caches, after every engine has received its weights."""
        self._memory.offload(parameters=True)
        dist.barrier()

    def around(self, publisher: StagedPublisher, policy: Policy, source: BatchSource, log: StepLog) -> VersionPublisher:
        """Return the publisher that moves the policy's memory, and makes the engines release theirs."""
        self._memory = DeviceMemory(lambda: _held(policy))
        policy.readable = self._memory.readable

        def release() -> None:
            if isinstance(self.update, HandOver):
                source.hold()
                self.update.give()

        return Colocated(publisher, self._memory, log, release)


def _held(policy: Policy) -> HeldTensors:
    """Return the tensors of a rank that take memory. The parameters of other networks are states: they are not
    published."""
    others = list[Tensor]()
    for network, optimizer in policy.others.values():
        others += [*network.parameters(), *network.packed(), *optimizer.states()]
    return HeldTensors(
        [*policy.network.parameters(), *policy.network.packed()],
        [tensor for network in policy.networks() for tensor in network.gradients()],
        [*policy.optimizer.states(), *others, *policy.frozen()],
    )


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
