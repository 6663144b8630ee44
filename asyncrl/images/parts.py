"""Images inside chat messages: the parts of a message's content that are one, in the forms of chat templates and of the
OpenAI API.

    {"type": "image", "image": DATA}
    {"type": "image_url", "image_url": {"url": DATA}}

DATA is what an ImageDecoder accepts: bytes or a data URL, but no other string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncrl.images import ImageRefused, data_url

Message = dict[str, Any]
REFUSED = ("video", "video_url", "audio", "audio_url", "input_audio", "file")
"""Types of parts that no model here reads."""


def images_in(messages: Sequence[Message]) -> list[object]:
    """Return the data of the images of messages, in order. Raises ImageRefused for parts that no model here reads."""
    return [_data(part) for message in messages for part in _parts(message) if _is_image(part)]


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return messages as a chat template renders them: of every image only that it is there."""
    return _with(messages, lambda: {"type": "image"})


def with_data_urls(messages: Sequence[Message], images: Sequence[bytes]) -> list[Message]:
    """Return messages in the form of the OpenAI API, with these images in the places of their own."""
    left = iter(images)
    return _with(messages, lambda: {"type": "image_url", "image_url": {"url": data_url(next(left))}})


def _with(messages: Sequence[Message], place: Callable[[], Message]) -> list[Message]:
    """Return messages with another part in the place of each image, in order."""
    return [
        {**message, "content": [place() if _is_image(part) else part for part in message["content"]]}
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
