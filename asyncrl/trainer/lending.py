"""Loans of the trainers' GPUs: while the trainers wait for a batch, engines use their GPUs (cluster.lend).

The engines of a loan are a fleet of their own, which is suspended between two loans: without memory, and unknown to the
router. The fleet that always serves does not notice a loan, and no version is published during one.

    lend        the trainers' memory leaves the GPUs but for the parameters; the engines take memory for weights, get
                the version that the others serve, and are compared with it; the parameters leave the GPUs; the engines
                take their cache, and the router sends them requests
    take back   the rollout side holds new requests back; the router forgets the engines; they return what they have
                generated, and release their memory; the requests continue on other engines; everything comes back to
                the GPUs

waits for     the engines, with the deadlines of the hand-over (engine/hand_over.py); all ranks, with the deadline of
              the process group
on failure    an engine that fails a call is lost and restarted, but not while the trainers use its GPU. They take it
              back only after a restarted engine has released its memory
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from asyncrl.engine.fleet import Fleet
from asyncrl.engine.hand_over import HandOver
from asyncrl.engine.loans import LoanRule
from asyncrl.metrics.record import StepLog
from asyncrl.trainer.loop import VersionPublisher
from asyncrl.trainer.offload import DeviceMemory


class Lending:
    """The loans of one trainer rank. Only rank 0 has `turns`, the engines' side of the hand-over, decides when to lend,
    and calls `hold` and `go_on`."""

    def __init__(
        self,
        fleet: Fleet,
        turns: HandOver | None,
        memory: DeviceMemory,
        *,
        lent: VersionPublisher,
        always: VersionPublisher,
        log: StepLog,
        allowed: Callable[[], bool],
        hold: Callable[[], None],
        go_on: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lent` publishes to the engines of a loan, and `always` to those that always serve. `hold` makes the rollout
        side hold requests back, and `go_on` lets it continue with a version."""
        self._fleet, self._turns, self._memory, self._log = fleet, turns, memory, log
        self._lent, self._always, self._allowed = lent, always, allowed
        self._hold, self._go_on, self._clock = hold, go_on, clock
        self._rule = LoanRule()
        self._version: int | None = None  # that the engines of a loan serve
        self._waiting: float | None = None  # since when
        self._began = self._cost = 0.0  # of the loan; its hand-overs, in seconds
        self._changes = 0  # of the fleet, before the loan
        self._figures: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether to lend now. Called between two requests for a batch, on rank 0."""
        self._waiting = self._clock() if self._waiting is None else self._waiting
        if self._version is not None:
            self._fleet.reconcile()  # engines and routers that were restarted during the loan
            return False
        if not self._allowed():
            return False
        return self._rule.due(self._clock() - self._waiting)

    def lend(self, version: int) -> None:
        """Give the GPUs to the engines, which then serve `version`."""
        started, self._changes = self._clock(), self._fleet.changes
        with self._log.span("lend"):
            self._memory.offload(parameters=False)
            sent = self._lent.publish(version)
        self._version, self._began = version, self._clock()
        self._cost = self._began - started
        self._figures["engines/lent"] = sent["engines"]

    def take_back(self) -> None:
        """Take the GPUs back, if they are lent. The wait for a batch has ended, or there was none."""
        if self._waiting is None and self._version is None:
            self._rule.ended(0.0, None)
        else:
            self._end_wait()

    def _end_wait(self) -> None:
        started, cost = self._clock(), None
        if self._version is not None:
            with self._log.span("take_back"):
                if self._turns:
                    self._hold()
                    self._fleet.suspend()
                    self._turns.give()
                    self._go_on(self._version)
                dist.barrier()
                self._memory.onload(everything=True)
            self._figures["time/lent"] = started - self._began
            if self._fleet.changes == self._changes + 1:  # suspended once; otherwise a restart was part of the time
                cost = self._cost + self._clock() - started
        if self._waiting is not None:
            self._rule.ended(started - self._waiting, cost)
        self._version = self._waiting = None

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version to the engines that always serve."""
        self._end_wait()
        return self._always.publish(version)

    def take_figures(self) -> dict[str, float]:
        """Return the metrics of the loan since the last call: none, if there was none."""
        figures, self._figures = self._figures, {}
        return figures
