"""The runs of a folder, and the files of each, followed while they grow.

Files alone are read, so a run may be on another machine of a shared file system, and may have ended. To learn whether a
file has grown, it is opened: network file systems keep attributes in a cache, but check them when a file is opened.

A folder may be a stranger's. Whatever its files hold or are, reading them ends, takes a bounded size, and fails with a
RecordError that concerns this run alone; links out of its folder are not followed.
"""

from __future__ import annotations

import os
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.reader import folder_of
from asyncrl.extensions.recording.writer import RECORDS, TRAINER
from asyncrl.extensions.timelines.files import FOLDER as TIMELINE
from asyncrl.extensions.view.inspection.page import section
from asyncrl.extensions.view.watch.anatomy import BatchFacts
from asyncrl.extensions.view.watch.ending import Ending, ending
from asyncrl.extensions.view.watch.episodes import EpisodeIndex
from asyncrl.extensions.view.watch.timelines import TimelineIndex
from asyncrl.jsonl import Tail, opened, parsed, read_object
from asyncrl.network.addresses import END
from asyncrl.progress import FOLDER as PROGRESS

Row = dict[str, Any]
CONFIG, STATUS, SUMMARY = "config.json", "status.json", "summary.json"
LEASE = "leases/run.lease"
"""The launcher's lease, which it renews every few seconds."""
LINES = ("metrics", "eval", "warnings", "elastic")
"""Files of lines that grow with the run, without .jsonl."""
DEPTH = 4
"""Folders below the watched one in which runs are looked for."""
DISCOVER_SECONDS = 5.0
"""Between two searches for new runs."""
SILENT_SECONDS = 60.0
"""A run that has neither ended nor written for so long has died, or is silent if no launcher has been seen."""
MOST_EPISODES = 20_000
"""Episodes of the latest batches that advice looks at, which takes a second."""
LAST_BYTES = 1 << 15
"""Bytes at the end of a file in which its last line is looked for."""
MOST_BYTES = 256 << 20
"""Size of a file of lines, above which it is refused: metrics of some 100,000 steps."""
MOST_FOLDERS = 100_000
"""Folders in which runs are looked for."""
MOST_CHARACTERS = 200
"""Length of a text in the list of runs."""


class WatchedRun:
    """The files of one run. Use it under its lock."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.RLock()
        self._marks, self._marked = dict[str, float](), 0.0
        self._start_anew()

    def _start_anew(self) -> None:
        self._made = _identity(self.folder / CONFIG)
        self._tails = {name: Tail(self.folder / f"{name}.jsonl", within=self.folder, most=MOST_BYTES) for name in LINES}
        self._rows: dict[str, list[Row]] = {name: [] for name in LINES}
        self._episodes: EpisodeIndex | None = None
        self.timelines = TimelineIndex(self.folder)
        self._facts: dict[tuple[int, float], BatchFacts] = {}

    def refresh(self) -> None:
        """Forget everything if the run was started again or resumed, which rewrites its files. Raises RecordError if a
        folder of it leads elsewhere."""
        self._check_folders()
        if _identity(self.folder / CONFIG) != self._made:
            self._start_anew()

    def rows(self, name: str) -> list[Row]:
        """Return all lines of one of LINES."""
        try:
            self._rows[name] += self._tails[name]()
        except RecordError:  # the run is being started again, so that another file continues in the middle of a line
            self._start_anew()
            self._rows[name] += self._tails[name]()
        return self._rows[name]

    def latest_batches(self, most: int, since: int = 0) -> list[BatchFacts]:
        """Return what happened in the latest batches from number `since` on, the oldest first: at most this many, and
        fewer of many episodes. Each batch is read once. Raises RecordError on damage."""
        self.timelines.refresh()
        kept: dict[tuple[int, float], BatchFacts] = {}
        episodes = 0
        for step in sorted((one for one in self.timelines.batches if one >= since), reverse=True)[:most]:
            batch = self.timelines.batches[step]
            key = step, batch.taken
            facts = self._facts.get(key) or BatchFacts.of(batch, self.timelines.groups(batch))
            kept[key] = facts
            episodes += facts.episodes
            if episodes >= MOST_EPISODES:
                break
        self._facts = kept
        return list(reversed(kept.values()))

    @property
    def episodes(self) -> EpisodeIndex:
        """Index of the recording. Raises RecordError if there is none."""
        if self._episodes is None:
            self._episodes = EpisodeIndex(self.folder)
        return self._episodes

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run; empty before it has started."""
        return self.document(CONFIG) or {}

    def document(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of the run; None if it is missing. Raises RecordError if it is damaged."""
        return read_object(self.folder / name, self.folder)

    def written(self) -> float:
        """Return the time of the last sign of life."""
        return max(self._size(name)[1] for name in ("metrics.jsonl", STATUS, CONFIG, LEASE))

    def ending(self) -> Ending:
        """Return whether the run goes on, and how it ended if not."""
        silent = time.time() - self.written()
        return ending(self.document, self.folder, silent if silent > SILENT_SECONDS else 0.0)

    def summary(self) -> Row:
        """Return what the list of runs shows. A run whose files are damaged is `bad`, for a reason."""
        try:
            return self._summary()
        except (RecordError, OSError) as error:
            bad = {"name": self.name, "title": "", "state": "bad", "reason": printable(str(error))}
            return {**bad, "step": 0, "steps": None, "reward": None, "written": 0.0}

    def _summary(self) -> Row:
        self._check_folders()
        config, ended = section(self.config, "run"), self.ending()
        self.document(STATUS)
        metrics = self.folder / "metrics.jsonl"
        last = self._last_line(metrics)
        return {
            "name": self.name,
            "title": str(config.get("name", ""))[:MOST_CHARACTERS],
            "state": ended.state,
            "reason": ended.reason[:MOST_CHARACTERS],
            "step": _figure(last, "step", metrics) or 0,
            "steps": _figure(config, "max_steps", self.folder / CONFIG),
            "reward": _figure(last, "reward/mean", metrics),
            "written": self.written(),
        }

    def _check_folders(self) -> None:
        """Raise RecordError if a folder of the run leads out of it."""
        records, here = self.folder / RECORDS, self.folder.resolve()
        timelines = self.folder / TIMELINE
        for path in (records, records / TRAINER, self.folder / PROGRESS, timelines, *timelines.glob("*")):
            if here not in path.resolve().parents:
                raise RecordError(f"{path}: it is a link out of {self.folder}: remove it")

    def marks(self) -> dict[str, float]:
        """Return numbers that change when a part of the run has changed. A run that has ended is not looked at as
        often."""
        now = time.monotonic()
        if self._marks.get("summary") and now - self._marked < DISCOVER_SECONDS:
            return self._marks
        marks = {name: float(self._size(f"{name}.jsonl")[0]) for name in LINES}
        records = folder_of(self.folder)
        marks["records"] = float(self._newest_bytes(records) + self._newest_bytes(records / TRAINER))
        marks["timeline"] = float(sum(map(self._newest_bytes, (self.folder / TIMELINE).glob("*"))))
        marks["status"] = self._size(STATUS)[1]
        marks["config"] = self._size(CONFIG)[1]
        marks["summary"] = max(self._size(name)[1] for name in (SUMMARY, END))
        marks["silent"] = float(time.time() - self.written() > SILENT_SECONDS)
        self._marks, self._marked = marks, now
        return marks

    def _size(self, name: str) -> tuple[int, float]:
        """Return the size and the time of the last change; zeros if the file is missing, or not to be read."""
        try:
            with opened(self.folder / name, self.folder) as file:
                found = os.fstat(file.fileno())
        except (OSError, RecordError):  # the list of runs says which
            return 0, 0.0
        return found.st_size, found.st_mtime

    def _newest_bytes(self, folder: Path) -> int:
        """Return a number that grows with the frames of a folder."""
        numbers = frames.files(folder)
        return (len(numbers) << 32) + self._size(str(frames.path_of(folder, numbers[-1])))[0] if numbers else 0

    def _last_line(self, path: Path) -> Row:
        """Return the last complete line of a file; empty if there is none."""
        try:
            with opened(path, self.folder) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
                lines = file.read(LAST_BYTES).rpartition(b"\n")[0].split(b"\n")
        except FileNotFoundError:
            return {}
        return parsed(lines[-1], f"{path}: the last line", "repair the line, or delete it") if lines[-1] else {}


class RunFolder:
    """A run, or all runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, WatchedRun] = {}
        self._lock, self._looked = threading.Lock(), float("-inf")

    def runs(self) -> dict[str, WatchedRun]:
        """Return the runs by their paths below the folder, ascending. New ones are found within DISCOVER_SECONDS."""
        with self._lock:
            if time.monotonic() - self._looked >= DISCOVER_SECONDS:
                named = sorted(((_name(self.root, folder), folder) for folder in _find(self.root)), reverse=True)
                found = dict(reversed(named))
                self._runs = {name: self._runs.get(name) or WatchedRun(name, folder) for name, folder in found.items()}
                self._looked = time.monotonic()
            return self._runs

    def run(self, name: str) -> WatchedRun:
        """Return a run by name. Raises RecordError if there is none; a name is never used as a path."""
        try:
            return self.runs()[name]
        except KeyError:
            raise RecordError(f"there is no run {name!r:.200} below {self.root}") from None


def _find(root: Path) -> list[Path]:
    """Return the folders that hold runs: those with settings, and with metrics or a recording."""
    found = []
    for folder, folders, files in islice(os.walk(root), MOST_FOLDERS):
        here = Path(folder)
        if CONFIG in (*files, *folders) and (
            ".asyncrl-run" in files or "metrics.jsonl" in files or "records" in folders
        ):
            found.append(here)
            folders.clear()
        elif len(here.relative_to(root).parts) >= DEPTH:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return found


def _name(root: Path, folder: Path) -> str:
    return printable(folder.resolve().name if folder == root else str(folder.relative_to(root)))


def printable(name: str) -> str:
    """Return the name of a file with the bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _figure(record: Row, name: str, path: Path) -> float | None:
    if not isinstance(value := record.get(name), int | float | None):
        raise RecordError(f"{path}: {name}: got {value!r:.40}, where a number belongs: repair the file")
    return value


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
