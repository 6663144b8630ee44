"""Recorders of a run: what the buffer is told and decides, as the events of a recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from asyncrl.records.events import Committed, CompressedGroup, Event, Rejected, packed
from asyncrl.records.writer import Writer
from asyncrl.rollout.buffer import Ticket
from asyncrl.schema import Group


class Recorder:
    """Recorder that writes through a Writer's thread, or records nothing without one. If writing fails, the run goes on
    and warns once."""

    def __init__(
        self,
        writer: Writer | None = None,
        warn: Callable[[str], None] = print,
        listeners: Sequence[Callable[[Group], None]] = (),
    ) -> None:
        """`listeners` get every group that was played to its end."""
        self._writer = writer
        self._warn = warn
        self._warned = False
        self._listeners = listeners
        self._seconds = 0.0
        self._reported = (0.0, 0)

    def committed(self, ticket: Ticket, group: Group, discarded: int) -> None:
        """Record that a finished group is handed in, whether or not it gets a seat."""
        self._tell(group)
        if content := self._content(group):
            images = group.images if content.images else None
            self.write(Committed(ticket.slot, content, discarded), images)

    def rejected(self, ticket: Ticket, reason: str, tokens: int, group: Group | None) -> None:
        """Record that a group is rejected."""
        if group:
            self._tell(group)
        content, images = (self._content(group), group.images) if group else (None, None)
        self.write(Rejected(ticket.slot, reason, tokens, content), images)

    def flush(self) -> None:
        """Wait until all events would survive the death of this process. Call this from a thread."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()

    def write(self, event: Event, images: Mapping[str, bytes] | None = None) -> None:
        """Write the next event, with the images that it names."""
        if self._writer is None:
            return
        with self._measured():
            self._writer.write(event, images)
        if self._writer.failed and not self._warned:
            self._warned = True
            self._warn(f"{self._writer.failed}. The run continues without it.")

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        if self._writer is None:
            return {}
        now = (self._seconds + self._writer.seconds, self._writer.written)
        seconds, size = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        return {"time/recording": seconds, "recording/bytes": float(size)}

    def _tell(self, group: Group) -> None:
        for listen in self._listeners:
            listen(group)

    def _content(self, group: Group) -> Any:
        """Return the content of a group, maybe compressed by another process; None if nothing is written."""
        if self._writer is None:
            return None
        with self._measured():
            done: CompressedGroup | None = getattr(group, "compressed", None)  # of one that came encoded
            return done or packed(group)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the time that recording takes from the event loop."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started
