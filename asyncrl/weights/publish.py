"""Publication of a version to every engine. All publishers have one protocol. Those that send do so in two parts, and
others may work around them:

    Publisher (here), NoEngines (trainer/publishers.py), those of extensions (TrainerHooks)        send
    CatchingUp (trainer/recovery.py)                                                               leaves versions out
    Background (background.py), what an extension puts around it (trainer/gpu_sharing.py)          say when, and where

trainer/publishers.py builds the chain of a run. A publisher that sends all weights goes through these steps:

    meet       every rank learns which engines there are
    fill       the stage's first rank copies its HF tensors into buckets while the engines still generate
               (staging=full: into all of them; some transports write files)
    hold       the rollout side holds back new requests
    update     pause -> begin -> send -> end -> verify, when due -> version -> continue   (engine/update.py)
    announce   the rollout side opens admission for the next cohort

The first two are `stage`, the others `complete`. With staging=full, and with files, only `stage` needs the trainer's
weights, so that the next batch can be trained beside `complete` (weights.overlap, Background). Its collectives then
have a process group of their own, because those of a training step must not come between them.

With staging=full, the engines are paused only for sending. With staging=stream they are also paused for gathering, all
of which overlaps with sending except for the first bucket, and only the memory of two buckets (Transport.memories) is
needed. Pipeline stages send from their first ranks, inside the session that rank 0 opened: at once, or in turn if the
transport requires it, where each has filled its memory before its turn. On GPUs buckets are filled in one stream and
sent in another.

    waits for     the engines (weights.timeout per call), the other stages (the process group's timeout)
    on failure    an engine that fails is lost and the others continue (engine/fleet.py); any other error leaves the
                  engines paused and ends the run, so that nothing is sampled from partly updated weights
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import WeightsConfig, streams
from asyncrl.engine.update import Pause, RolloutSide, Update
from asyncrl.errors import EngineError
from asyncrl.parallel import Parallel, from_all, from_first
from asyncrl.schema import POLICY
from asyncrl.weights.bucket import Bucket, fill, nbytes, plan_buckets, unit_of
from asyncrl.weights.checksum import QUESTION, Checksums, ExpectedChecksums, SentWeights, differing, merge, parse
from asyncrl.weights.transport import Transport

UNSENT = dict.fromkeys(("fill", "pause", "verify", "bytes", "engines"), 0.0)
"""Metrics of a version that is not sent to engines."""
NAMED = 8
"""Number of differing tensors that a message names."""


class VersionPublisher(ABC):
    """Publisher of versions to every engine. What it does beside `publish` is nothing, unless it has to."""

    @abstractmethod
    def publish(self, version: int) -> dict[str, float]:
        """Publish a version. Returns the seconds of each part, and the bytes sent."""

    def finish(self) -> None:
        """Wait for a publish that works in the background. Raises its error."""
        return  # most work in the loop

    def idle(self) -> bool:
        """Return whether no publish works in the background. Raises the error of one that failed."""
        return True

    def take_back(self) -> None:
        """Wait until no engine uses this rank's GPU. Called on every rank before a batch is trained."""
        return  # most engines use others

    def training(self) -> AbstractContextManager[None]:
        """Have all that a batch's update needs on the device inside the block."""
        return nullcontext()

    def parameters(self, version: int) -> AbstractContextManager[None]:
        """Have the parameters on the device inside the block, while `version` is served."""
        return nullcontext()


@dataclass(frozen=True)
class Staged:
    """What the rest of a publish needs."""

    version: int
    metrics: dict[str, float]
    expected: ExpectedChecksums | None = None


class StagedPublisher(VersionPublisher):
    """Publisher in two parts, of which only the first needs the trainer's weights."""

    verified: Checksums | None = None
    """Checksums of the last version that was verified; the same on every rank."""

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version; runs on every rank. Returns the seconds of filling, of verifying and of the pause, the
        bytes sent by this rank, the number of engines that serve, and those of the weights."""
        return self.complete(self.stage(version))

    @abstractmethod
    def stage(self, version: int) -> Staged:
        """Do what needs the trainer's weights."""

    @abstractmethod
    def complete(self, staged: Staged) -> dict[str, float]:
        """Do the rest, in any thread. Returns the metrics of the whole publish."""


def verifies(settings: WeightsConfig, version: int, *, unproven: bool) -> bool:
    """Return whether a version is verified: if some engine has never proved its weights, and every so often."""
    every = settings.verify_every
    return settings.verify and bool(unproven or (every and version % every == 0))


@dataclass(frozen=True)
class Outgoing:
    """What a publisher sends."""

    weights: SentWeights
    expected: Callable[[], ExpectedChecksums]
    """Returns what engines with these weights answer, to which the tensors are still to be added."""
    merged: str | None = POLICY
    """The model whose additions are merged into the weights, if it has some."""


class Publisher(StagedPublisher):
    """The publisher of one trainer rank that sends all weights. Only exporting ranks hold buckets; only rank 0 controls
    the engines' updates and versions."""

    def __init__(
        self,
        parallel: Parallel,
        update: Update,
        transport: Transport,
        outgoing: Outgoing,
        settings: WeightsConfig,
        rollout: RolloutSide,
        group: dist.ProcessGroup | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Plan and allocate the buckets, while the engines still load: none of them is needed.

        `update` is the protocol by which rank 0 updates the fleet. `group` has all ranks, for collectives beside
        those of training (weights.overlap). `sent` is called on every rank before the engines continue."""
        self._parallel = parallel
        self._fleet = update.fleet
        self._update = update
        self._transport = transport
        self._weights = outgoing.weights
        self._outgoing = outgoing
        self._settings = settings
        self._rollout = rollout
        self._group = group
        self._sent = sent
        gpu = parallel.device.type == "cuda"
        self._full = not streams(settings, gpu=gpu) and not transport.ahead
        self._streams = not self._full and not transport.ahead
        self._stream = torch.cuda.Stream(parallel.device) if gpu else None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send-weights")
        self._plan = plan_buckets(self._weights.described(), settings.bucket_mb << 20, together=unit_of)
        sizes = [nbytes(bucket) for bucket in self._plan]
        if not self._full:
            sizes = [max(sizes)] * min(transport.memories, len(sizes)) if sizes else []
        self._memory = [transport.allocate(size, parallel.device) for size in sizes]

    @torch.no_grad()
    def stage(self, version: int) -> Staged:
        """Copy the weights, or write them to files, while the engines generate. Unless they are streamed, they may
        change when this returns."""
        started = time.monotonic()
        self._meet(version)
        unproven = self.verified is None or bool(self._fleet.joining)
        expected = self._outgoing.expected() if verifies(self._settings, version, unproven=unproven) else None
        if self._transport.ahead:
            self._send(expected)
        elif self._full:
            for _ in self._fill(expected):
                pass
            if self._stream:  # what is sent need not wait for what is queued behind the copies
                torch.cuda.current_stream(self._parallel.device).synchronize()
        metrics = {
            "fill": time.monotonic() - started,
            "bytes": float(sum(nbytes(bucket) for bucket in self._plan)),
            "engines": float(len(self._fleet.serving)),
            **({} if self._streams else self._weights.figures()),
        }
        return Staged(version, metrics, expected)

    @torch.no_grad()
    def complete(self, staged: Staged) -> dict[str, float]:
        """Let every engine load and serve a staged version; runs on every rank, in any thread. Returns all metrics."""
        first = self._parallel.is_first
        if first:
            self._rollout.hold()
        verified = 0.0
        with self._update.paused() if first else nullcontext(Pause(time.monotonic())) as pause:
            with self._update.session() if first and self._transport.session else nullcontext():
                if not self._transport.ahead:
                    self._send(staged.expected)
                self._deliver(staged.version)
            if staged.expected is not None:
                verified = self._verify(staged.expected)
            if first:
                self._update.label(staged.version)
            self._sent()
        if first:
            self._rollout.announce(staged.version)
        return {
            **staged.metrics,
            "pause": pause.seconds,
            "verify": verified,
            "engines": float(len(self._fleet.serving)),
            **(self._weights.figures() if self._streams else {}),
        }

    # -- participants --------------------------------------------------------------------------------------

    def _meet(self, version: int) -> None:
        """Broadcast rank 0's list of engines, after rank 0 has prepared for the version."""
        if self._parallel.is_first:
            self._fleet.reconcile()
            self._transport.start(version)
        engines = from_first((self._fleet.serving, self._fleet.joining, self._fleet.changes))
        if not self._parallel.is_first:
            self._fleet.adopt(*engines)
            if self._parallel.exports:
                self._transport.start(version)

    def _agree(self) -> None:
        """Wait for every rank; engines that one rank lost are lost to all."""
        for lost in from_all(self._fleet.lost, self._group):
            self._lose(lost)

    def _lose(self, lost: dict[str, str]) -> None:
        for url, reason in lost.items():
            self._fleet.lose(url, reason)

    # -- sending -------------------------------------------------------------------------------------------

    def _send(self, expected: ExpectedChecksums | None) -> None:
        """Send every stage's buckets. Each rank of a stage takes part in its gathers, and its first rank sends."""
        ready = zip(self._memory, self._plan, strict=True) if self._full else self._fill(expected)
        if self._parallel.pp == 1:
            self._send_each(ready)
            return
        self._agree()  # the session is open
        if self._transport.turns and self._parallel.exports:
            waits = self._parallel.pp_rank > 0
            filled = list(islice(ready, len(self._memory))) if waits else []
            with self._turn():
                self._send_each(chain(filled, ready))
        else:
            self._send_each(ready)
        self._agree()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the previous stage before this block, and let the next one begin after it. Engines that a stage has
        lost are lost to the next."""
        stage, stages = self._parallel.pp_rank, self._parallel.pp_group
        assert stages
        group = self._group or stages
        if stage > 0:
            lost: list[Any] = [None]
            dist.recv_object_list(lost, dist.get_global_rank(stages, stage - 1), group)
            self._lose(lost[0])
        yield
        if not self._parallel.is_last_stage:
            dist.send_object_list([self._fleet.lost], dist.get_global_rank(stages, stage + 1), group)

    def _send_each(self, ready: Iterable[tuple[Tensor, Bucket]]) -> None:
        """Send each bucket while the next one is being filled (or one after the other, if all are filled)."""
        sending: Future[None] | None = None
        for flat, bucket in ready:
            if sending:
                sending.result()
            if self._stream and not self._full:
                self._stream.wait_stream(torch.cuda.current_stream())  # which has filled the bucket
            sending = self._sender.submit(self._send_one, flat, bucket)
        if sending:
            sending.result()

    def _send_one(self, flat: Tensor, bucket: Bucket) -> None:
        """Send one bucket, in the sender's thread and stream. Its memory may be refilled when this returns."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._transport.send(flat, bucket)
            if self._stream:
                self._stream.synchronize()

    def _fill(self, expected: ExpectedChecksums | None) -> Iterator[tuple[Tensor, Bucket]]:
        """Fill and yield the buckets in turn. If there is less memory than buckets, one is sent while the next is
        filled."""
        stream = self._weights.stream(merged=self._outgoing.merged)
        for number, bucket in enumerate(self._plan):
            flat = self._memory[number % len(self._memory)][: nbytes(bucket)]
            for name, tensor in fill(flat, bucket, stream).items():
                if expected is not None:
                    expected.add(name, tensor)
            yield flat, bucket
        rest = [name for name, _ in stream]  # ranks that export nothing still take part in every gather
        assert not rest, f"the stream yielded tensors that were not planned: {rest}"

    def _deliver(self, version: int) -> None:
        """Deliver the version until the engines have taken it. They may ask for the full weights."""
        while not from_first(not self._parallel.is_first or self._transport.deliver(version), self._group):
            if self._parallel.exports:
                self._transport.start(version, full=True)
            self._send(None)
        self._transport.accepted(version)

    # -- verification --------------------------------------------------------------------------------------

    def _verify(self, expected: ExpectedChecksums) -> float:
        """Compare every engine's own checksums with those of the weights that were sent, and lose engines that differ.
        Returns the seconds that it took."""
        started = time.monotonic()
        whole = merge([stage for stage in from_all(expected.result(), self._group) if stage])
        self.verified = whole
        if self._parallel.is_first:
            for url, answer in self._fleet.call(*QUESTION).items():
                try:
                    wrong = differing(whole, parse(answer))
                except EngineError as error:
                    wrong = [str(error)]
                if wrong:
                    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
                    names = ", ".join(wrong[:NAMED]) + more
                    self._fleet.lose(url, f"{url} holds other weights than were sent (weights.verify): {names}")
        return time.monotonic() - started
