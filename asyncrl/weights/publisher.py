"""Publishers bring versions to every engine. All have one protocol. Those that send do so in two parts, and others may
work around them:

    Publisher (publish.py), AdapterPublisher (adapters.py), NoEngines (trainer/publishers.py)      send
    CatchingUp (trainer/recovery.py)                                                               leaves versions out
    Background (here), Colocated (trainer/colocated.py)                                            say when, and where

trainer/publishers.py builds the chain of a run.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl.config import WeightsConfig
from asyncrl.engine.adapters import InUse

if TYPE_CHECKING:  # batch sources have a rollout side, also where nothing needs torch (mode=rollout_only)
    from asyncrl.weights.checksum import Checksums, ExpectedChecksums

SPAN = "publish_background"
UNSENT = dict.fromkeys(("fill", "pause", "verify", "bytes", "engines"), 0.0)
"""Metrics of a version that is not sent to engines."""


class RolloutSide:
    """What a publisher tells the process that plays. This one is nobody: nothing is generated, or it hears of it
    otherwise."""

    def hold(self) -> None:
        """Hold back new requests, because the weights are about to change."""

    def announce(self, version: int) -> InUse:
        """Announce that every engine serves `version`. Returns which adapters are in use."""
        return InUse([], {})


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

    @property
    def verified(self) -> Checksums | None:
        """Return the checksums of the last version that was verified; the same on every rank."""
        return None

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
class _Flight:
    """A publish in the background."""

    version: int
    began: float = field(default_factory=time.time)
    result: Future[dict[str, float]] = field(default_factory=Future)


class Background(VersionPublisher):
    """Publication of a version while the trainer trains the next batch (weights.overlap).

        in the training loop       wait for the publish in flight; stage the version (publish.py)
        in a thread of its own     complete it: hold, pause, send, verify, label, continue, announce

    One publish is in flight at most. The optimizer changes only weights that are already copied. The publish in flight
    is waited for without a deadline here: its calls and collectives have their own. Its error is raised by the next
    publish, by `finish` and by `idle`; `failed` gets it at once, in the thread.
    """

    def __init__(
        self,
        inner: StagedPublisher,
        *,
        ended: Callable[[str, int, float, float], None] = lambda span, batch, start, end: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`ended` is called with a span's name, its batch, and the wall-clock times of a publish in the background;
        `failed` in the thread, with its error."""
        self._inner = inner
        self._ended = ended
        self._failed = failed
        self._flight: _Flight | None = None
        self._metrics: dict[str, float] = {"pause": 0.0, "verify": 0.0, "background": 0.0}

    def publish(self, version: int) -> dict[str, float]:
        """Stage a version, after the publish in flight, and complete it in the background. Returns the seconds of
        staging, and the other metrics of the publish that ended last, with its seconds in the background."""
        self.finish()
        staged = self._inner.stage(version)
        self._flight = flight = _Flight(version)
        threading.Thread(target=self._complete, args=(staged, flight), name="publish", daemon=True).start()
        return {**staged.metrics, **self._metrics, "fill": staged.metrics["fill"]}

    def finish(self) -> None:
        """Wait for the publish in flight. Raises its error."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._metrics = flight.result.result()
        end = flight.began + self._metrics["background"]
        self._ended(SPAN, flight.version - 1, flight.began, end)

    def idle(self) -> bool:
        """Return whether no publish is in flight. Raises the error of one that failed."""
        if self._flight and self._flight.result.done():
            self.finish()
        return self._flight is None

    def _complete(self, staged: Staged, flight: _Flight) -> None:
        try:
            metrics = self._inner.complete(staged)
        except BaseException as error:  # noqa: BLE001  the training loop raises it
            flight.result.set_exception(error)
            self._failed(error)
        else:
            flight.result.set_result({**metrics, "background": time.time() - flight.began})
