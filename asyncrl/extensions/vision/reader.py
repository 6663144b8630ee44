"""How a model that sees reads images: what its requests hold, and the decoding of images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.vision.decoder import DecodingProcesses
from asyncrl.extensions.vision.extension import settings_of
from asyncrl.extensions.vision.fitting import ImageSizes, fitted_size
from asyncrl.extensions.vision.sizes import ImageShape, forbidden_ids, image_shape
from asyncrl.images import ImageReader, ImageRefused

PROCESSOR = "preprocessor_config.json"
"""File of a model folder that says how its images are read."""


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
    """Maximum number of images in a request (vision.max_images)."""

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
            raise ImageRefused(f"the request has {len(images)} images, more than vision.max_images={self.most}")
        return sum(self.shape.tokens(png) for png in images) - len(images)


@dataclass(frozen=True)
class Vision(ImageReader):
    """How the model of a run reads images: how requests hold them, and the processes that bring them to its size."""

    tokens: ImageTokens
    decoder: DecodingProcesses
    most_tokens: int
    ahead = 32

    @property
    def forbidden(self) -> Sequence[int]:  # type: ignore[override]
        """Ids of placeholders, and of the marks around them."""
        return self.tokens.forbidden

    def begin(self, image: object) -> Future[bytes]:
        """Begin to decode an image (bytes, a data URL or a Path), and return the future of a PNG file of the size that
        the model reads. It raises ImageRefused, which says why and what helps."""
        return self.decoder.begin(image)

    def added(self, token_ids: Sequence[int], images: Sequence[bytes]) -> int:
        """Return how many more tokens the model reads than there are ids. Raises ImageRefused if they do not fit
        together."""
        return self.tokens.added(token_ids, images)

    def close(self) -> None:
        """End the processes, after the images that are being decoded."""
        self.decoder.close()


def vision_of(config: Config, model: Path, hf: dict[str, Any]) -> Vision:
    """Return how a model folder reads images. `hf` is its config.json.

    Raises ConfigError if the settings leave no room for an image.
    """
    settings, shape = settings_of(config), image_shape(hf)
    least, most = _limits(model)
    most = min(most, settings.max_pixels or most)
    try:
        fitted_size(shape.side, shape.side, shape.side, least, most)
    except ValueError as error:
        remedy = f"{error}, the least in {model / PROCESSOR}: raise it."
        raise ConfigError("vision.max_pixels", settings.max_pixels, remedy) from None
    start, placeholder, end = (hf[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    tokens = ImageTokens(start, placeholder, end, forbidden_ids(hf), shape, settings.max_images)
    decoder = DecodingProcesses(ImageSizes(shape.side, least, most), settings.max_bytes)
    return Vision(tokens, decoder, most // shape.side**2)


def _limits(model: Path) -> tuple[int, int]:
    """Return the least and the most pixels of an image of the model's own processor, in either of the forms that
    transformers reads. Raises ConfigError if there is none."""
    try:
        processor = json.loads((model / PROCESSOR).read_text())
    except (OSError, ValueError) as error:
        remedy = f"It has a vision tower, but {PROCESSOR} cannot be read ({error}): copy it from the model's source."
        raise ConfigError("model.path", str(model), remedy) from None
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **(processor.get("size") or {})}
    return processor.get("min_pixels") or size["shortest_edge"], processor.get("max_pixels") or size["longest_edge"]
