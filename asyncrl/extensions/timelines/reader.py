"""Reader of the timelines of a run: those of each process, of a run that is over or goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.extensions.recording.frames import FramePosition, Frames, files
from asyncrl.extensions.recording.index import usable
from asyncrl.extensions.timelines.files import FOLDER, Record, decode, folder_of
from asyncrl.observability.intervals import ENVIRONMENT, PHASES, TOOL
from asyncrl.observability.timeline import EpisodeTimeline


def durations(episode: EpisodeTimeline) -> dict[str, float]:
    """Return the seconds that an episode spent in each phase. Time in tools is not counted as their environment's."""
    found = dict.fromkeys(PHASES, 0.0)
    for one in episode.intervals:
        found[one.phase] += one.seconds
    found[ENVIRONMENT] = max(0.0, found[ENVIRONMENT] - found[TOOL])
    return found


def processes(run: Path) -> list[str]:
    """Return the names of the folders of all processes that have a timeline."""
    return sorted(folder.name for folder in (run / FOLDER).glob("*") if folder.is_dir())


def read(run: Path, process: str, start: FramePosition | None = None) -> Iterator[tuple[FramePosition, list[Record]]]:
    """Yield the records of each complete frame from a position on, with the position after it. A frame that is being
    written is skipped, and found by the next call. Raises RecordError on damage."""
    folder = folder_of(run, process)
    if not files(folder):
        return
    for frame in Frames(folder, start):
        yield FramePosition(frame.place.file, frame.end), decode(frame.data)


class TimelineReader:
    """Follows the timelines of all processes of a run, which may still be running or not have begun."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.positions: dict[str, FramePosition] = {}
        """Where each process's next frame begins."""

    def skip(self) -> None:
        """Begin with what is written from now on."""
        for process in processes(self._run):
            if lines := usable(folder_of(self._run, process)):
                self.positions[process] = lines[-1].after

    def new(self) -> Iterator[Record]:
        """Yield the records since the last call, process by process."""
        for process in processes(self._run):
            for position, records in read(self._run, process, self.positions.get(process)):
                yield from records
                self.positions[process] = position
