"""Writer of a recording or a timeline: a thread compresses and appends the events, so that the event loop does not.

waits for     the disk; the event loop waits for it only while MOST_WAITING bytes are queued
deadline      PATIENCE: a disk that accepts nothing for so long counts as failed
on failure    such as a full disk: `failed` holds the error, and nothing more is written. What is on disk stays valid.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import events, frames, images
from asyncrl.extensions.recording.frames import Compressed, FramePosition, Frames
from asyncrl.extensions.recording.index import IndexEntry, index_path, usable

T = TypeVar("T")
Decode = Callable[[bytes], Sequence[T]]
"""Decodes the events of a frame."""
Entry = Callable[[FramePosition, int, Sequence[T]], IndexEntry]
"""Builds the index entry of a frame."""

RECORDS = "records"
"""Folder of the recording in the run folder."""
TRAINER = "trainer"
"""Folder in the recording for what the trainer wrote about the same batches."""
MOST_WAITING = 256 << 20
FRAME_BYTES = 1 << 20
"""Minimum size of the encoded events in a full frame: a frame is closed by the event that reaches it."""
LINGER = 0.25
"""Seconds that an event of a recording waits for others to share its frame. A frame costs some 200 µs of its own."""
PATIENCE = 60.0
SPARE_BYTES = 16 << 20
"""Recording stops when the disk has less than this left: the run's other files matter more."""


class _Waiting(Generic[T]):
    """An event that waits to be written, encoded, and the images that it names."""

    def __init__(self, event: T, data: Sequence[bytes | Compressed], shown: Mapping[str, bytes]) -> None:
        self.event, self.data, self.shown = event, data, shown
        self.encoded = sum(part.size if isinstance(part, Compressed) else len(part) for part in data)
        self.size = self.encoded + sum(map(len, shown.values()))


class Writer(Generic[T]):
    """Appends to the recording in `folder`, which may be that of an earlier run."""

    def __init__(
        self,
        folder: Path,
        *,
        decode: Decode[Any] = events.decode,
        entry: Entry[Any] = IndexEntry.of,
        linger: float = LINGER,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`decode` and `entry` are those of the events. An event waits up to `linger` seconds for others to share its
        frame. `warn` is called once if writing fails, in any thread."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.left_out = folder, repair(folder, decode, entry)
        """`left_out` is the size in bytes of the torn tail that an earlier run left."""
        self._entry, self._linger = entry, linger
        self._warn = warn
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[T]] = []
        self._bytes = 0
        self._hurry = self._closing = self._done = False
        self.failed: RecordError | None = None
        self.written, self.seconds = 0, 0.0
        """Bytes written to disk, and CPU seconds of the thread, so far."""
        numbers = frames.files(folder)
        self._number = numbers[-1] + 1 if numbers else 0
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def write(self, event: T, shown: Mapping[str, bytes] | None = None) -> None:
        """Queue an event, to be written after all earlier ones, and the images that it names before it."""
        data = events.encode(event)
        with self._changed:
            self._wait_until(lambda: self._bytes <= MOST_WAITING)
            if self.failed:
                return
            self._waiting.append(_Waiting(event, data, shown or {}))
            self._bytes += self._waiting[-1].size
            if len(self._waiting) == 1 or self._bytes >= FRAME_BYTES:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything has reached the operating system."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._wait_until(lambda: not self._bytes)

    def close(self) -> None:
        """Write the remaining events and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wait_until(lambda: self._done)

    def _wait_until(self, true: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: true() or self.failed, PATIENCE):
            problem = f"the disk of {self._folder} did not accept the waiting data within {PATIENCE:.0f} s"
            self._fail(RecordError(f"{problem}: recording ends here"))

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with index_path(self._folder).open("ab") as index:
                while taken := self._take():
                    self._append(taken, index)
                    self.seconds = time.thread_time()
                    with self._changed:
                        self._bytes -= sum(one.size for one in taken)
                        self._changed.notify_all()
        except OSError as error:
            self._fail(RecordError(f"the recording in {self._folder} cannot be written: {error.strerror}"))
        except RecordError as error:
            self._fail(error)
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _take(self) -> list[_Waiting[T]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: self._closing or self._hurry or self._bytes >= FRAME_BYTES, self._linger)
            size = count = 0
            while count < len(self._waiting) and size < FRAME_BYTES:
                size += self._waiting[count].encoded
                count += 1
            taken = self._waiting[:count]
            del self._waiting[:count]
            self._hurry = self._hurry and bool(self._waiting)
            return taken

    def _append(self, taken: list[_Waiting[T]], index: BinaryIO) -> None:
        disk = os.statvfs(self._folder)
        if (free := disk.f_bavail * disk.f_frsize) < SPARE_BYTES:
            raise RecordError(f"the disk of {self._folder} has {free >> 20} MB left: recording ends here")
        for one in taken:
            self.written += images.write(self._folder, one.shown)
        frame = frames.encode(events.frame_of([one.data for one in taken]))
        path = frames.path_of(self._folder, self._number)
        with path.open("ab") as file:
            if file.tell() == 0:
                file.write(frames.MAGIC)
            place = frames.FramePosition(self._number, file.tell())
            file.writelines(frame)
            end = file.tell()
        index.write(msgspec.json.encode(self._entry(place, end, [one.event for one in taken])) + b"\n")
        index.flush()
        self.written += end - place.offset
        if end >= frames.FILE_BYTES:
            self._number += 1

    def _fail(self, error: RecordError) -> None:
        with self._changed:
            first, self.failed = self.failed is None, error
            self._waiting.clear()
            self._changed.notify_all()
        if first:
            self._warn(f"{error}. The run continues without it.")


def repair(folder: Path, decode: Decode[Any] = events.decode, entry: Entry[Any] = IndexEntry.of) -> int:
    """Cut off a torn tail, after which nothing could be read, and return its size in bytes. Raises RecordError on
    damage."""
    lines = usable(folder)
    rest = Frames(folder, lines[-1].after if lines else None)
    lines += [entry(frame.place, frame.end, decode(frame.data)) for frame in rest]
    if numbers := frames.files(folder):
        path = frames.path_of(folder, numbers[-1])
        whole = path.stat().st_size - rest.torn
        os.truncate(path, whole)
        if not whole:
            path.unlink()
    if lines:
        index_path(folder).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return rest.torn
