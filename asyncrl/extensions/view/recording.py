"""A recording as pages and the terminal show it: it may still grow, and the trainer's scores belong to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import events, frames
from asyncrl.extensions.recording.events import Event, Scored
from asyncrl.extensions.recording.frames import FramePosition
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.recording.writer import TRAINER


class ViewedRecording(Recording):
    """A recording that is read while it is written, with the trainer's log-probabilities of its batches."""

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._scores: ViewedRecording | None = None

    @property
    def places(self) -> list[FramePosition]:
        """Positions of the frames that hold groups and batches, in order."""
        found = {*self._groups.values(), *self._steps.values()}
        return sorted(found, key=lambda place: (place.file, place.offset))

    def at(self, place: FramePosition) -> list[Event]:
        """Return the events of a frame. Raises RecordError on damage."""
        return events.decode(frames.read(self.folder, place).data)

    def refresh(self) -> None:
        """Find what was written since the recording was opened. A resumed run is to be opened again instead. Raises
        RecordError on damage."""
        self._read_on()
        if self._scores:
            self._scores.refresh()

    def scores(self, step: int) -> dict[str, list[float]]:
        """Return the trainer's log-probabilities of a batch: by uid, one for each token that the policy wrote, in
        order; NaN where it computed none. Empty if none were recorded. Raises RecordError on damage."""
        folder = self.folder / TRAINER
        if self._scores is None and folder.is_dir() and frames.files(folder):
            self._scores = ViewedRecording(folder)
        if self._scores is None or step not in self._scores._steps:
            return {}
        written = reversed(self._scores._frame(self._scores._steps[step]))
        event = next(event for event in written if isinstance(event, Scored) and event.step == step)
        found: dict[str, list[float]] = {}
        values: list[float] = np.frombuffer(event.logprobs, "<f4").tolist()
        start = 0
        for group in self.batch(step).groups:
            found[group.uid] = values[start : start + group.num_tokens]
            start += group.num_tokens
        if start != len(values):
            raise RecordError(f"{folder}: batch {step} has {start} tokens, but {len(values)} were scored")
        return found
