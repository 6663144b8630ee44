"""Images: their names, their sizes, and the number of tokens that a model reads for one.

Every image is brought to its final form once, where it enters the rollout process (an ImageDecoder, which an extension
has): a PNG file in RGB, of exactly the size that the model's own processor would give it. The processors of the engine
and of the trainer then only normalise the pixels, so that both read the same numbers; their resizing differs from one
library to the next.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ImageRefused(ValueError):
    """Raised for an image that is not accepted. It states why and what helps; the caller knows whose it is."""


def image_name(png: bytes) -> str:
    """Return the name of an image, the SHA-256 of its file."""
    return hashlib.sha256(png).hexdigest()


def data_url(png: bytes) -> str:
    """Return an image as a data URL, the only form in which an engine gets one."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height from the header of a PNG file. Raises ValueError for anything else."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    if not png.startswith(SIGNATURE) or png[12:16] != b"IHDR" or not width or not height:
        raise ValueError(f"{png[:24]!r} does not begin a PNG file")
    return width, height


@dataclass(frozen=True)
class ImageShape:
    """How a model cuts an image into tokens: square patches, `merge` times `merge` of them for one token."""

    patch: int  # pixels
    merge: int

    def grid(self, png: bytes) -> tuple[int, int, int]:
        """Return the number of patches in time, height and width. Raises ValueError for an image of another size than
        `fitted_size` gives."""
        width, height = png_size(png)
        if width % self.side or height % self.side:
            raise ValueError(f"an image of {width} x {height} pixels is not a multiple of {self.side} pixels")
        return 1, height // self.patch, width // self.patch

    def tokens(self, png: bytes) -> int:
        """Return the number of tokens that an image takes in the model's context."""
        return math.prod(self.grid(png)) // self.merge**2

    @property
    def side(self) -> int:
        """Pixels of the side of the square that one token sees."""
        return self.patch * self.merge


@dataclass(frozen=True)
class ImageTokens:
    """How a model's requests hold images: one placeholder for each in the token ids, and the images beside them."""

    start: int
    placeholder: int
    end: int
    forbidden: Sequence[int]
    """Ids that the policy must not sample, these three among them."""
    shape: ImageShape
    most: int
    """Maximum number of images in a request (rollout.images.max_images)."""

    def added(self, token_ids: Sequence[int], images: Sequence[bytes]) -> int:
        """Return how many more tokens the model reads than there are ids.

        Raises ImageRefused unless there are as many placeholders as images, each between the marks of an image: an
        engine can hang on more placeholders, and ignores an image that has none, or one without marks, in silence.
        """
        places = [place for place, token in enumerate(token_ids) if token == self.placeholder]
        marked = all(
            tuple(token_ids[max(0, at - 1) : at + 2]) == (self.start, self.placeholder, self.end) for at in places
        )
        if len(places) != len(images) or not marked:
            raise ImageRefused(
                f"the request has {len(places)} placeholders (token {self.placeholder}) for {len(images)} images: pass "
                f"the images of its messages, one for each placeholder, which stands between the tokens {self.start} "
                f"and {self.end} and is not expanded"
            )
        if len(images) > self.most:
            raise ImageRefused(f"the request has {len(images)} images, more than rollout.images.max_images={self.most}")
        return sum(self.shape.tokens(png) for png in images) - len(images)


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of the images that a model reads: multiples of `side`, with `least` to `most` pixels."""

    side: int
    least: int
    most: int


class ImageDecoder(Protocol):
    """Brings images of unknown origin to the form that the model reads (Extension.decoder). It is created with the
    sizes and the maximum number of bytes of a file."""

    def begin(self, image: object) -> Future[bytes]:
        """Begin to decode an image (bytes, a data URL or a Path), and return the future of a PNG file of the size that
        the model reads. It raises ImageRefused, which says why and what helps."""
        ...

    def close(self) -> None:
        """Release what is held, after the images that are being decoded."""
        ...


@dataclass(frozen=True)
class Vision:
    """How the model of a run reads images: how requests hold them, and the decoder that brings them to its size."""

    tokens: ImageTokens
    decoder: ImageDecoder
    most_tokens: int
    """Maximum number of tokens that an image takes."""


def fitted_size(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the width and height to which the processors of Qwen's models resize an image: multiples of `side` with
    `least` to `most` pixels in all, which keep the ratio as far as that allows.

    The result is a fixed point: a processor with these limits leaves an image of that size as it is. Raises ValueError
    if `most` is below four times `least`, because rounding could then break one limit whenever it keeps the other.
    """
    if most < 4 * least:
        raise ValueError(f"{most} pixels are fewer than four times {least}")
    while (fitted := _resized(width, height, side, least, most)) != (width, height):
        width, height = fitted
    return fitted


def _resized(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return what `smart_resize` of transformers (models/qwen2_vl) returns, with the width first."""
    found = round(width / side) * side, round(height / side) * side
    if math.prod(found) > most:
        scale = math.sqrt(width * height / most)
        return max(side, math.floor(width / scale / side) * side), max(side, math.floor(height / scale / side) * side)
    if math.prod(found) < least:
        scale = math.sqrt(least / (width * height))
        return math.ceil(width * scale / side) * side, math.ceil(height * scale / side) * side
    return found
