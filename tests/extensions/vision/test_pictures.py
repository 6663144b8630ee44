"""Images of question files, in the layouts of public data sets, each in its place."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.images import images_in
from asyncrl.tasks.build import build
from asyncrl.tasks.files import FileTask
from tests.fakes import compose_values


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def task(file: Path, **changes: Any) -> FileTask:
    values = compose_values("experiment=tiny", "task=file", "task.train_file=/rows", "task.reward=exact")
    values["task"] |= {"train_file": str(file), "image_key": "images", **changes}
    made: Any = build(load(values).task)
    return made


def rows(folder: Path, *found: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in found))
    return file


def content(one: FileTask, index: int = 0) -> list[Any]:
    """Return what a question shows, in order: texts, and the bytes of images."""
    parts = one.question(index)["messages"][-1]["content"]
    return [
        part["text"] if part["type"] == "text" else getattr(part["image"], "read_bytes", lambda p=part: p["image"])()
        for part in parts
    ]


def test_images_of_every_spelling_take_their_marks_places(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(1))
    bare = base64.b64encode(png(2)).decode()
    images = ["one.png", bare, f"data:image/png;base64,{bare}"]
    file = rows(tmp_path, {"prompt": "a<image>b<image><image>", "images": images})
    question = task(file).question(0)
    assert content(task(file)) == ["a", png(1), "b", png(2), png(2)]
    del question["messages"]  # what rewards get has no images
    assert question == {"answer": "1", "prompt": "a<image>b<image><image>"}


def test_images_without_places_come_before_the_text(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(1))
    file = rows(tmp_path, {"prompt": "what?", "images": "one.png"}, {"prompt": "nothing", "images": []})
    assert content(task(file)) == [png(1), "what?"]
    assert images_in(task(file).question(1)["messages"]) == []


def test_hugging_face_layouts_are_read(tmp_path: Path) -> None:
    """Columns of Image and Sequence(Image), and messages with parts of type image."""
    messages = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]}]
    both = [{"bytes": png(1), "path": None}, {"bytes": png(2), "path": "gone.png"}]
    tables = {"one": {"prompt": "what?", "images": both[0]}, "two": {"prompt": "<image>and<image>", "images": both}}
    tables["chat"] = {"prompt": messages, "images": both[:1]}
    for name, row in tables.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"answer": "1", **row}]), tmp_path / f"{name}.parquet")
    assert content(task(tmp_path / "one.parquet")) == [png(1), "what?"]
    assert content(task(tmp_path / "two.parquet")) == [png(1), "and", png(2)]
    assert content(task(tmp_path / "chat.parquet")) == [png(1), "what?"]


@pytest.mark.parametrize("escape", ["../secret.png", "/etc/hostname", "link.png"])
def test_no_path_leaves_the_folder_of_the_images(tmp_path: Path, escape: str) -> None:
    inner = tmp_path / "set"
    inner.mkdir()
    (tmp_path / "secret.png").write_bytes(png(1))
    (inner / "link.png").symlink_to(tmp_path / "secret.png")
    file = rows(inner, {"prompt": "what?", "images": escape})
    with pytest.raises(ConfigError, match=r"Row 0 of task.train_file names a file outside .*set task.image_folder"):
        task(file)
    if escape != "/etc/hostname":
        assert content(task(rows(inner, {"prompt": "a", "images": "secret.png"}), image_folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": "gone.png"}, "there is no such file"),
        ({"images": 7}, "must be a path, the bytes of a file, base64"),
        ({"images": {"bytes": None, "path": None}}, "must be a path, the bytes of a file, base64"),
        ({"images": "http://example.org/a.png"}, "there is no such file"),
        ({"other": 1}, "task.image_key: got 'images'. Row 0 of task.train_file has only the fields"),
    ],
)
def test_what_is_no_image_of_a_row_is_refused_with_its_row(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        task(rows(tmp_path, {"prompt": "what?", **row}))


def test_more_or_fewer_images_than_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(1))
    file = rows(tmp_path, {"prompt": "<image><image>", "images": "one.png"}, {"prompt": "<image>", "images": []})
    for index in (0, 1):
        with pytest.raises(ConfigError, match=f"Question {index} has . images for . places"):
            task(file).question(index)
