"""Process that decodes images of unknown origin. It imports little of asyncrl, and can open nothing.

Decoders of images are C code that reads what strangers wrote. Here they run in a process that, once its imports are
done, can open no file and no socket, write no file, and has limits on memory and on the CPU time of each image. Of
Pillow's formats only PNG, JPEG and WebP are tried, and the number of pixels is checked before any is decoded.

in     {"data": a file of an image, "side", "least", "most"} (children/processes.py)
out    {"png": a PNG file}, or {"refused": why the file is, with the remedy}
"""

from __future__ import annotations

import io
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL import MpoImagePlugin as _Mpo  # noqa: F401  (imported later, they would open files)
from PIL import TiffImagePlugin as _Exif  # noqa: F401
from PIL import WebPImagePlugin as _WebP  # noqa: F401

from asyncrl.extensions.children.processes import framed, messages
from asyncrl.extensions.vision.fitting import fitted_size

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MAX_SOURCE_PIXELS = 40_000_000
"""Pixels of a file as it is given, before it is scaled down: 8K, and some more."""
MAX_ASPECT = 200
"""Maximum ratio of the sides; the processors of the models refuse longer images."""
BROKEN = (OSError, ValueError, SyntaxError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error)
"""What Pillow's parsers raise on a broken file. Anything else ends the process, which refuses the image as well."""
MEMORY, CPU_SECONDS = 2 << 30, 20.0


class Refused(Exception):
    """Raised for an image that is not accepted, with the remedy."""


def prepare(data: bytes, side: int, least: int, most: int) -> bytes:
    """Return an image as a PNG file in RGB of the size that the model reads. Raises Refused."""
    image = _opened(data)
    try:
        image.load()
        if image.mode not in MODES:
            raise Refused(f"it has pixels of mode {image.mode}: convert it to 8 bits in RGB")
        found = _opaque(image).resize(fitted_size(*image.size, side, least, most), Image.Resampling.BICUBIC)
    except MemoryError:
        raise Refused(f"its {image.width} x {image.height} pixels take too much memory: scale it down") from None
    except BROKEN as error:
        raise Refused(f"it is damaged or incomplete ({error}): write it anew") from None
    file = io.BytesIO()
    found.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _opened(data: bytes) -> Image.Image:
    """Return the image, of which only the header has been read."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # an MPO file holds previews as well
    except MemoryError:
        raise Refused("its header takes too much memory: write it anew") from None
    except BROKEN as error:
        kind = "" if isinstance(error, UnidentifiedImageError) else f" ({type(error).__name__}: {error})"
        raise Refused(f"it is no PNG, JPEG or WebP image{kind}: convert it to one of these") from None
    width, height = image.size
    if frames != 1:
        raise Refused(f"it is a moving image of {frames} frames, and videos are not supported: pass single frames")
    if width * height > MAX_SOURCE_PIXELS:
        remedy = "scale it down"
        raise Refused(f"it has {width} x {height} pixels, more than the limit of {MAX_SOURCE_PIXELS:,}: {remedy}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Refused(f"it has {width} x {height} pixels, and a side over {MAX_ASPECT} times the other: cut it up")
    return image


def _opaque(image: Image.Image) -> Image.Image:
    """Return an image in RGB. What is transparent shows white, as in a browser."""
    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGB", layer.size, (255, 255, 255))
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _warm_up() -> None:
    """Use every part of Pillow once, so that nothing is imported later."""
    for form in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (28, 28)).save(file, form, exif=Image.Exif())
        prepare(file.getvalue(), 28, 784, 3136)


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),  # stdin, stdout and stderr: no further one can be opened, files and sockets alike
    ):
        resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the run, which closes the pipe


def _reply(out: BinaryIO, message: dict[str, object]) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    out.write(framed(message))
    out.flush()


def main() -> None:
    """Serve requests until the other side closes the pipe."""
    Image.MAX_IMAGE_PIXELS = None  # Pillow only warns at first; _opened refuses
    _warm_up()
    _limit()
    out = sys.stdout.buffer
    for request in messages(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            _reply(out, {"png": prepare(**request)})
        except Refused as refused:
            _reply(out, {"refused": str(refused).encode(errors="replace").decode()})
    os._exit(0)


if __name__ == "__main__":
    main()
