"""Publication of a version beside the training of the next batch (weights.overlap)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from asyncrl.threads import ThreadPerCall
from asyncrl.weights.publish import Staged, StagedPublisher, VersionPublisher

SPAN = "publish_background"


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
        self._flight: Future[tuple[int, float, dict[str, float]]] | None = None
        """The publish in the background: its version, when it began, and its metrics."""
        self._metrics: dict[str, float] = {"pause": 0.0, "verify": 0.0, "background": 0.0}

    def publish(self, version: int) -> dict[str, float]:
        """Stage a version, after the publish in flight, and complete it in the background. Returns the seconds of
        staging, and the other metrics of the publish that ended last, with its seconds in the background."""
        self.finish()
        staged = self._inner.stage(version)
        self._flight = ThreadPerCall().submit(self._complete, staged)
        return {**staged.metrics, **self._metrics, "fill": staged.metrics["fill"]}

    def finish(self) -> None:
        """Wait for the publish in flight. Raises its error."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        version, began, self._metrics = flight.result()
        self._ended(SPAN, version - 1, began, began + self._metrics["background"])

    def idle(self) -> bool:
        """Return whether no publish is in flight. Raises the error of one that failed."""
        if self._flight and self._flight.done():
            self.finish()
        return self._flight is None

    def _complete(self, staged: Staged) -> tuple[int, float, dict[str, float]]:
        began = time.time()
        try:
            metrics = self._inner.complete(staged)
        except BaseException as error:
            self._failed(error)
            raise
        return staged.version, began, {**metrics, "background": time.time() - began}
