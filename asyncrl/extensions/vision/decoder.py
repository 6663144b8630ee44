"""Images of any origin, brought to the form that models read; the decoding is done by a process of its own (worker.py).

Data comes as bytes, as a data URL, or as a Path object, which only a task's own code can make. No other string is
accepted: a path or a URL in a message of an agent, an environment or a client must not make this process, or an engine,
open it.

waits for     a free process, then its reply, at most DEADLINE seconds
on a hang     it is killed and the image refused; the next image starts another process
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import select
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.extensions.children.processes import LENGTH, decoded, framed
from asyncrl.extensions.vision.fitting import ImageSizes
from asyncrl.images import ImageRefused

DEADLINE = 60.0
WORKERS = 4
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.ASCII | re.IGNORECASE)


class DecodingProcesses:
    """Decodes images in WORKERS processes, which start when they are needed."""

    def __init__(self, sizes: ImageSizes, max_bytes: int) -> None:
        """`max_bytes` is the maximum size of a file as it is given."""
        self._sizes, self._max_bytes = asdict(sizes), max_bytes
        self._threads = ThreadPoolExecutor(WORKERS, "images")
        self._idle: list[subprocess.Popen[bytes]] = []

    def begin(self, image: object) -> Future[bytes]:
        """Begin to decode an image (bytes, a data URL or a Path), and return the future of a PNG file of the size that
        the model reads. It raises ImageRefused, which says why and what helps."""
        return self._threads.submit(self._decode, image)

    def _decode(self, image: object) -> bytes:
        data = _content(image, self._max_bytes)
        process = self._idle.pop() if self._idle else _started()
        replied = False
        try:
            reply = _ask(process, {**self._sizes, "data": data})
            replied = True
        finally:
            if not replied:  # its next reply would be of this image
                _end(process)
        self._idle.append(process)
        if why := reply.get("refused"):
            raise ImageRefused(why)
        png: bytes = reply["png"]
        return png

    def close(self) -> None:
        """End the processes, after the images that are being decoded."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            _end(self._idle.pop())


def _content(image: object, most: int) -> bytes:
    """Return the bytes of an image file. Raises ImageRefused."""
    if isinstance(image, Path):
        try:
            with image.open("rb") as file:
                image = file.read(most + 1)
        except OSError as error:
            raise ImageRefused(f"{str(image)!r} cannot be read ({error.strerror}): correct the path") from None
    if isinstance(image, str):
        if not (head := _DATA_URL.match(image)):
            remedy = "only bytes and data URLs (data:image/png;base64,...) are: nothing opens a path or an address"
            raise ImageRefused(f"{image!r:.60} is not accepted as an image; {remedy}")
        if len(image) > 2 * most + 64:
            raise ImageRefused(f"its data URL has {len(image):,} characters, for a limit of {most:,} bytes: shrink it")
        try:
            image = base64.b64decode(image[head.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageRefused(f"its data URL is not base64 ({error}): encode it anew") from None
    if not isinstance(image, bytes | bytearray):
        raise ImageRefused(f"{type(image).__name__} is not an image: pass the bytes of a PNG, JPEG or WebP file")
    if len(image) > most:
        raise ImageRefused(f"it has {len(image):,} bytes, more than vision.max_bytes={most:,}: shrink it")
    return bytes(image)


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncrl.extensions.vision.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply. Raises ImageRefused if the process does not reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    end, deadline = process.stdout.fileno(), time.monotonic() + DEADLINE
    poll = select.poll()
    poll.register(end, select.POLLIN)

    def read(size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            chunk = os.read(end, min(size - len(found), 1 << 20)) if ready else None
            if not chunk:
                why = "took too long" if chunk is None else "used more CPU time or memory than an image may, or crashed"
                raise ImageRefused(f"the process that decodes images {why} on it: write it anew, or scale it down")
            found += chunk
        return bytes(found)

    try:
        process.stdin.write(framed(request))
        process.stdin.flush()
    except BrokenPipeError:
        process.wait(DEADLINE)
    (size,) = LENGTH.unpack(read(LENGTH.size))
    reply: dict[str, Any] = decoded(read(size))
    return reply
