"""A uvicorn server inside a process that does more than serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class SignalFreeServer(uvicorn.Server):
    """Server that leaves signals to its process. uvicorn's own raises SIGTERM once more when it has ended, which would
    kill the process before it has closed anything."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def end(self) -> None:
        """Make `serve` return soon."""
        self.should_exit = True
