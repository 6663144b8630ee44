"""Images of a question file, in the layouts of public data sets, and their places in the question's messages.

    a column of paths, bytes, base64 or {bytes, path}, or of lists of these (Hugging Face's Image and Sequence(Image))
    places: <image> in a text, or a part {"type": "image"} of a message; without either, before the text

Paths are read below one folder only, because a question file may come from elsewhere.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.schema import Message
from asyncrl.tasks import Question, Task
from asyncrl.tasks.files import FileTask

MARK = "<image>"
BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")
"""First bytes of PNG, JPEG and WebP files."""


class PicturedTask(Task):
    """A task of files whose rows hold images."""

    def __init__(self, task: Task, section: TaskConfig) -> None:
        """Check the images of all rows. Raises ConfigError."""
        if not isinstance(task, FileTask):
            remedy = "Only questions of files and datasets have rows with images: set null."
            raise ConfigError("task.image_key", section.image_key, remedy)
        self._task, self._section, self.held_out = task, section, task.held_out
        assert section.image_key is not None
        self._key = section.image_key
        for index in range(task.size):
            self._images(task.question(index), index)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self._task.size

    def question(self, index: int) -> Question:
        """Return row `index` with its images in the places of its messages, and without their column."""
        row = self._task.question(index)
        messages = with_images(row["messages"], self._images(row, index), f"Question {index}")
        return {**{name: value for name, value in row.items() if name != self._key}, "messages": messages}

    def _images(self, row: Question, index: int) -> list[Path | bytes]:
        """Return the images of a row. Paths are relative to its file."""
        number, place = (1, index - self.held_out) if index >= self.held_out else (0, index)
        setting = self._task.SOURCES[number]
        folder = Path(self._section.image_folder or Path(getattr(self._section, setting)).parent).expanduser()
        return images_of(row, self._key, folder, f"Row {place} of task.{setting}")


def images_of(row: dict[str, Any], key: str, folder: Path, where: str) -> list[Path | bytes]:
    """Return the images of a row, in order. Raises ConfigError for what is neither a file in the folder nor data."""
    given = row[key]
    return [_image(one, folder, where) for one in (given if isinstance(given, list) else [given]) if one is not None]


def _image(given: Any, folder: Path, where: str) -> Path | bytes:
    if isinstance(given, dict):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str) or not given:
        remedy = f"{where} has {given!r:.80}: it must be a path, the bytes of a file, base64, or {{bytes, path}}."
        raise ConfigError("task.image_key", type(given).__name__, remedy)
    if data := _decoded(given):
        return data
    path, root = Path(folder, given).resolve(), folder.resolve()
    if not path.is_relative_to(root):
        remedy = f"{where} names a file outside {root}: set task.image_folder to the folder of all images."
        raise ConfigError("task.image_folder", given[:200], remedy)
    if not path.is_file():
        remedy = f"{where} names {str(path)[:200]}, and there is no such file: set task.image_folder, or correct it."
        raise ConfigError("task.image_key", given[:200], remedy)
    return path


def _decoded(text: str) -> bytes | None:
    """Return the data of a data URL or of bare base64 of an image file; None for anything else, such as a path."""
    content = text.partition(";base64,")[2] if text.startswith("data:image/") else text
    try:
        data = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data.startswith(BEGINNINGS) else None


def with_images(messages: list[Message], images: list[Path | bytes], where: str) -> list[Message]:
    """Return messages with the images in their places. Raises ConfigError if there are more or fewer places."""
    if not any(True for _ in _places(messages)):
        first = next(place for place, message in enumerate(messages) if message["role"] == "user")
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": messages[first]["content"]}]
        messages = [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]
    left = iter(images)
    places = len(list(_places(messages)))
    if places != len(images):
        remedy = f"{where} has {len(images)} images for {places} places ({MARK}, or parts of type image): correct it."
        raise ConfigError("task.image_key", len(images), remedy)
    return [
        {**message, "content": [{**part, "image": next(left)} if _is_place(part) else part for part in parts]}
        if any(map(_is_place, parts := _parts(message["content"])))
        else message
        for message in messages
    ]


def _parts(content: Any) -> list[Message]:
    """Return the parts of a message's content; a text is cut at its marks."""
    if not isinstance(content, str):
        return content if isinstance(content, list) else []
    pieces = content.split(MARK)
    parts = [part for text in pieces for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return [part for part in parts if part.get("text") != ""]


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and "image" not in part


def _places(messages: list[Message]) -> Iterator[Message]:
    return (part for message in messages for part in _parts(message["content"]) if _is_place(part))
