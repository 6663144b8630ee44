"""Messages, and the images in them with their names.

An image is a part of a message's content, in the form of chat templates or of the OpenAI API:

    {"type": "image", "image": DATA}
    {"type": "image_url", "image_url": {"url": DATA}}

DATA is what an ImageReader accepts: bytes or a data URL, but no other string. Where it enters the rollout process, an
image gets its final form once: a PNG file in RGB, of exactly the size that the model's own processor would give it.
The processors of the engine and of the trainer then only normalise the pixels, so that both read the same numbers;
their resizing differs from one library to the next.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

Message = dict[str, Any]
REFUSED = ("video", "video_url", "audio", "audio_url", "input_audio", "file")
"""Types of parts that no model here reads."""
READS_NONE = "the model of this run reads no images: choose one that does (model.path), or send text"


class ImageRefused(ValueError):
    """Raised for an image that is not accepted. It states why and what helps; the caller knows whose it is."""


class ImageReader:
    """How the model of a run reads images. This one is that of models which read text alone; the record of a family
    with a tower names that of its models (Tower.reader)."""

    forbidden: Sequence[int] = ()
    """Ids that the policy must not sample: a later turn's prompt would announce an image that is not there."""
    most_tokens: int = 0
    """Maximum number of tokens that an image takes."""
    ahead: int = 0
    """Number of a task's questions whose images are read before they are drawn."""

    def begin(self, image: object) -> Future[bytes]:
        """Begin to bring an image (bytes, a data URL or a Path) to the form that the model reads, and return the future
        of a PNG file. It raises ImageRefused, which says why and what helps."""
        refused = Future[bytes]()
        refused.set_exception(ImageRefused(READS_NONE))
        return refused

    def added(self, token_ids: Sequence[int], images: Sequence[bytes]) -> int:
        """Return how many more tokens the model reads than there are ids, which hold a placeholder for each image.
        Raises ValueError if they do not fit together."""
        if images:
            raise ValueError(f"the request has {len(images)} images, but the model of this run reads none")
        return 0

    def close(self) -> None:
        """Release what is held, after the images that are being read."""


def are_messages(value: object) -> bool:
    """Return whether a user's value is a list of messages."""
    return isinstance(value, list | tuple) and all(isinstance(one, dict) and _is_message(one) for one in value)


def _is_message(one: Message) -> bool:
    content = one.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    readable = content is None or (isinstance(content, str | list | tuple) and all(isinstance(x, dict) for x in parts))
    return isinstance(one.get("role"), str) and ("content" in one or "tool_calls" in one) and readable


def image_name(png: bytes) -> str:
    """Return the name of an image, the SHA-256 of its file."""
    return hashlib.sha256(png).hexdigest()


def data_url(png: bytes) -> str:
    """Return an image as a data URL, the only form in which an engine gets one."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def images_in(messages: Sequence[Message]) -> list[object]:
    """Return the data of the images of messages, in order. Raises ImageRefused for parts that no model here reads."""
    return [_data(part) for message in messages for part in _parts(message) if _is_image(part)]


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return messages as a chat template renders them: of every image only that it is there."""
    return [
        {**message, "content": [{"type": "image"} if _is_image(part) else part for part in message["content"]]}
        if any(map(_is_image, _parts(message)))
        else message
        for message in messages
    ]


def _parts(message: Message) -> Iterator[Message]:
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, dict):
            yield part


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in REFUSED:
        raise ImageRefused(f"a part of type {kind!r} is not supported: pass text and images only")
    return kind in ("image", "image_url")


def _data(part: Message) -> object:
    found = part.get(part["type"])
    return found.get("url") if isinstance(found, dict) and part["type"] == "image_url" else found
