"""Append-only files of checksummed, compressed frames.

    file     MAGIC, then frames, until FILE_BYTES are reached and the next file begins
    frame    stored u32, raw u32, crc u32, little-endian; then `stored` bytes: `raw` bytes, compressed with zstd, whole
             or in parts that follow each other
    crc      CRC-32 of the two lengths and the stored bytes

A writer that was killed, or whose disk was full, leaves an incomplete last frame: a torn tail. Readers skip it and
report its length. A bad frame before the end is damage, and raises RecordError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import pyarrow

from asyncrl.errors import RecordError
from asyncrl.jsonl import opened

MAGIC = b"asyncrl records 1\n"
FILE_BYTES = 64 << 20
MAX_RAW = 1 << 30
"""Maximum size of a frame; one that claims to hold more is damaged."""
_HEADER = struct.Struct("<III")
_codec = pyarrow.Codec("zstd", compression_level=1)


class Compressed(msgspec.Struct, frozen=True, array_like=True):
    """A part of a frame's content that is compressed already, and its size before."""

    size: int
    data: bytes


@dataclass(frozen=True)
class FramePosition:
    """Position of a frame."""

    file: int
    offset: int


@dataclass(frozen=True)
class Frame:
    """Content of a frame, and where the next one begins."""

    place: FramePosition
    data: bytes
    end: int


def path_of(folder: Path, file: int) -> Path:
    """Return the path of file number `file`."""
    return folder / f"{file:06d}.frames"


def files(folder: Path) -> list[int]:
    """Return the numbers of the existing files, ascending."""
    return sorted(int(path.stem) for path in folder.glob("*.frames") if path.stem.isdecimal())


def compress(data: bytes) -> Compressed:
    """Compress a part of a frame's content."""
    return Compressed(len(data), _codec.compress(data, asbytes=True))


def encode(parts: Iterable[bytes | Compressed]) -> list[bytes]:
    """Encode a frame whose content is that of the parts, in this order. Returns what is to be written, in pieces."""
    found: list[Compressed] = []
    plain: list[bytes] = []
    for part in [*parts, Compressed(0, b"")]:
        if not isinstance(part, Compressed):
            plain.append(part)
            continue
        if plain:
            found.append(compress(b"".join(plain)))
            plain.clear()
        found.append(part)
    if (size := sum(part.size for part in found)) > MAX_RAW:
        raise RecordError(f"a frame has {size} bytes, more than the limit of {MAX_RAW}")
    stored = [part.data for part in found]
    lengths = struct.pack("<II", sum(map(len, stored)), size)
    crc = zlib.crc32(lengths)
    for data in stored:
        crc = zlib.crc32(data, crc)
    return [lengths + struct.pack("<I", crc), *stored]


def read(folder: Path, place: FramePosition) -> Frame:
    """Read the frame that begins there. Raises RecordError if none does."""
    path = path_of(folder, place.file)
    try:
        with opened(path, folder) as file:
            return _read(file, path, place.file, place.offset)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None


class Frames:
    """All complete frames from a place on, in order. Iterating raises RecordError on damage; afterwards `torn` is the
    number of bytes at the end of the last file that are not a complete frame."""

    def __init__(self, folder: Path, start: FramePosition | None = None) -> None:
        self._folder, self._start = folder, start or FramePosition(0, 0)
        self.torn = 0

    def __iter__(self) -> Iterator[Frame]:
        numbers = [number for number in files(self._folder) if number >= self._start.file]
        for number in numbers:
            path = path_of(self._folder, number)
            with opened(path, self._folder) as file:
                yield from self._of(file, path, number, last=number == numbers[-1])

    def _of(self, file: BinaryIO, path: Path, number: int, *, last: bool) -> Iterator[Frame]:
        size = path.stat().st_size
        if file.read(len(MAGIC)) != MAGIC:
            if last and size < len(MAGIC):
                self.torn = size
                return
            raise RecordError(f"{path} is not a recording of asyncrl, or has another format version")
        offset = max(len(MAGIC), self._start.offset if number == self._start.file else 0)
        while offset < size:
            try:
                frame = _read(file, path, number, offset)
            except RecordError:
                if last and _ends_torn(file, offset, size):
                    self.torn = size - offset
                    return
                raise
            yield frame
            offset = frame.end


def _ends_torn(file: BinaryIO, offset: int, size: int) -> bool:
    """Return whether the bad frame reaches to the end of the file: then it is the one that was being written last."""
    file.seek(offset)
    header = file.read(_HEADER.size)
    return len(header) < _HEADER.size or offset + _HEADER.size + _HEADER.unpack(header)[0] >= size


def _read(file: BinaryIO, path: Path, number: int, offset: int) -> Frame:
    file.seek(offset)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise RecordError(f"{path}: no complete frame at byte {offset}")
    stored, raw, crc = _HEADER.unpack(header)
    if stored > MAX_RAW or raw > MAX_RAW:
        raise RecordError(f"{path}: the frame at byte {offset} is damaged")
    data = file.read(stored)
    if len(data) < stored:
        raise RecordError(f"{path}: no complete frame at byte {offset}")
    if zlib.crc32(data, zlib.crc32(header[:8])) != crc:
        raise RecordError(f"{path}: the frame at byte {offset} is damaged (its checksum differs)")
    try:
        plain: bytes = _codec.decompress(data, decompressed_size=raw, asbytes=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise RecordError(f"{path}: the frame at byte {offset} is damaged: {error}") from None
    return Frame(FramePosition(number, offset), plain, offset + _HEADER.size + stored)
