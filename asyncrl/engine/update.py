"""Protocol of one update of the fleet's weights, from pause to continue.

    pause      in_place: requests freeze and keep their KV cache; retract: they return to the queue and are prefilled
               again under the new weights; abort: they return unfinished, and the client requests the rest; drain:
               the rollout side has waited until none is in flight
    flush      drop the caches of the old weights, except with in_place
    begin      open a session. One that a dead trainer left open is closed first
    (bytes)    transfer the weights
    end        post-process the weights in the engine
    (verify)   compare checksums, when they are due
    version    set the version once, after the last byte; every engine confirms it
    continue   resume generation, and let the router send requests to engines that joined

On an error the engines stay paused, so that nothing is sampled from unverified weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.engine.calls import Answer, CallRefused
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.served import InUse
from asyncrl.errors import DeadlineExceeded

FLUSH_PAUSE = 0.05


@dataclass
class Pause:
    """Time for which the engines were paused for an update."""

    began: float
    seconds: float = 0.0


class RolloutSide:
    """What a publisher tells the process that plays. This one is nobody: nothing is generated, or it hears of it
    otherwise."""

    def hold(self) -> None:
        """Hold back new requests, because the weights are about to change."""

    def announce(self, version: int) -> InUse:
        """Announce that every engine serves `version`. Returns what they must keep."""
        return InUse()


class Update:
    """Update protocol of a run's fleet."""

    def __init__(self, fleet: Fleet, *, mode: str, before_label: Callable[[str], Answer] | None = None) -> None:
        """`before_label` is called with each engine before it gets a version's label."""
        self.fleet = fleet
        self._before_label = before_label
        # no request is left to abort; after a retraction a scheduler would not even clean up what has just ended
        self._mode = "abort" if mode == "drain" else mode

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Pause the engines in this block. They continue at its end, but not after an error."""
        self.fleet.call("/pause_generation", {"mode": self._mode})  # each scheduler pauses between two steps
        pause = Pause(began=time.monotonic())
        if self._mode != "in_place":
            self.fleet.on_each(self._flush)
        yield pause
        self.fleet.call("/continue_generation")
        pause.seconds = time.monotonic() - pause.began
        self.fleet.admit()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open an update session, so that weights may be sent in this block."""
        self.fleet.on_each(self._begin)
        yield
        self.fleet.call("/end_weight_update")

    def label(self, version: int) -> None:
        """Set the version of the weights, once all of them have arrived. Engines that do not confirm it are lost."""
        if self._before_label:
            self.fleet.on_each(self._before_label)
        self.fleet.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        for url, served in self.fleet.versions().items():
            if served != str(version):
                self.fleet.lose(url, f"{url} reports version {served} after version {version} was published")

    def _flush(self, url: str) -> Answer:
        """Flush the cache; retry while the engine refuses because it still cleans up aborted or retracted requests."""
        deadline = time.monotonic() + self.fleet.timeout
        while True:
            try:
                return self.fleet.post(url, "/flush_cache")
            except CallRefused as refusal:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{url} to flush its cache", self.fleet.timeout, str(refusal)) from None
            time.sleep(FLUSH_PAUSE)

    def _begin(self, url: str) -> Answer:
        try:
            return self.fleet.post(url, "/begin_weight_update", {"selector": self.fleet.selector})
        except CallRefused:  # a trainer that died left its session open
            self.fleet.post(url, "/end_weight_update")
            return self.fleet.post(url, "/begin_weight_update", {"selector": self.fleet.selector})
