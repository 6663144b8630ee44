"""Publication of a version while the trainer trains the next batch (weights.overlap).

    in the training loop       wait for the publish in flight; stage the version (publish.py)
    in a thread of its own     complete it: hold, pause, send, verify, label, continue, announce

One publish is in flight at most. The optimizer changes only weights that are already copied.

waits for     the publish in flight, whose calls and collectives have their own deadlines
on failure    its error is raised by the next publish, by `finish`, and, while the trainer waits for a batch, by what
              `idle_and` returns; `failed` gets it at once, in the thread
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.weights.publish import Staged

SPAN = "publish_background"


class StagedPublisher(Protocol):
    """Publisher in two parts."""

    def stage(self, version: int) -> Staged:
        """Do what needs the trainer's weights."""
        ...

    def complete(self, staged: Staged) -> dict[str, float]:
        """Do the rest, in any thread. Returns the figures of the whole publish."""
        ...


@dataclass(frozen=True)
class _Flight:
    """A publish in the background."""

    version: int
    began: float = field(default_factory=time.time)
    result: Future[dict[str, float]] = field(default_factory=Future)


class OverlappedPublisher:
    """Publisher that returns as soon as the weights are staged."""

    def __init__(
        self,
        publisher: StagedPublisher,
        *,
        ended: Callable[[str, int, float, float], None] = lambda span, batch, start, end: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`ended` is called with a span's name, its batch, and the wall-clock times of a publish in the background;
        `failed` in the thread, with its error."""
        self._publisher, self._ended, self._failed = publisher, ended, failed
        self._flight: _Flight | None = None
        self._figures: dict[str, float] = {"pause": 0.0, "verify": 0.0, "background": 0.0}

    def publish(self, version: int) -> dict[str, float]:
        """Stage a version, after the publish in flight, and complete it in the background. Returns the seconds of
        staging, and the other figures of the publish that ended last, with its seconds in the background."""
        self.finish()
        staged = self._publisher.stage(version)
        self._flight = flight = _Flight(version)
        threading.Thread(target=self._complete, args=(staged, flight), name="publish", daemon=True).start()
        return {**staged.figures, **self._figures, "fill": staged.figures["fill"]}

    def finish(self) -> None:
        """Wait for the publish in flight. Raises its error."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._figures = flight.result.result()
        end = flight.began + self._figures["background"]
        self._ended(SPAN, flight.version - 1, flight.began, end)

    def idle_and(self, needed: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns whether no publish is in flight and one is `needed`, and that raises the error
        of one that failed."""

        def needs_weights() -> bool:
            if self._flight and self._flight.result.done():
                self.finish()
            return self._flight is None and needed()

        return needs_weights

    def _complete(self, staged: Staged, flight: _Flight) -> None:
        try:
            figures = self._publisher.complete(staged)
        except BaseException as error:  # noqa: BLE001  the training loop raises it
            flight.result.set_exception(error)
            self._failed(error)
        else:
            flight.result.set_result({**figures, "background": time.time() - flight.began})
