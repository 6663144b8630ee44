"""Rows of a user's JSONL, JSON, parquet and arrow files, as a run reads and checks them when it starts."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.images import are_messages

COUNTED = "rows are counted from 0"


def rows_of_file(field: str, path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises ConfigError for whatever is wrong with it, with the line."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(field, path, "There is no such file.")
    readers = {".jsonl": _of_json, ".json": _of_json, ".parquet": _of_columns, ".arrow": _of_columns}
    if file.suffix not in readers:
        raise ConfigError(field, path, "Must end in .jsonl, .json, .parquet or .arrow.")
    where = ""
    for where, row in readers[file.suffix](field, path, file):
        if not isinstance(row, dict):
            remedy = f"Every row must be an object with the task's fields, not {type(row).__name__}."
            raise ConfigError(field, where, remedy)
        _check_kept(field, where, row)
        yield row
    if not where:
        raise ConfigError(field, path, "The file has no rows.")


def _of_columns(field: str, path: str, file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a parquet file, or of an arrow file of `datasets`."""
    import pyarrow.ipc
    import pyarrow.parquet

    numbers = count()
    try:
        columns = pyarrow.parquet.ParquetFile if file.suffix == ".parquet" else pyarrow.memory_map
        with columns(str(file)) as stored:
            batches = stored.iter_batches() if file.suffix == ".parquet" else pyarrow.ipc.open_stream(stored)
            for batch in batches:
                yield from ((f"{path}, row {next(numbers)}", row) for row in batch.to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(field, path, f"Not a complete {file.suffix[1:]} file: {error}.") from None


def _of_json(field: str, path: str, file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file: lines of JSON, separated by newlines only, or in a .json file also one array of
    rows."""
    with file.open("rb") as lines:
        whole = file.suffix == ".json" and lines.read(1 << 16).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        lines.seek(0)
        if whole:
            text = "".join(_text(field, path, place, line) for place, line in enumerate(lines, start=1))
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(_parsed(field, path, text)))
            return
        for place, line in enumerate(lines, start=1):
            where = f"{path}, line {place}"
            if (text := _text(field, path, place, line)).strip():
                yield where, _parsed(field, where, text.removesuffix("\n"))


def _text(field: str, path: str, place: int, line: bytes) -> str:
    try:
        return line.decode("utf-8" if place > 1 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(field, f"{path}, line {place}", f"Not UTF-8: {error.reason}. Convert the file.") from None


def _parsed(field: str, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise ConfigError(field, where, f"Not JSON: {error.msg}, at {place}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(field, where, f"Not JSON: {error}.") from None


def _check_kept(field: str, where: str, row: dict[str, Any]) -> None:
    """Check that a row can be encoded, because rows go into recordings and checkpoints."""
    try:
        msgspec.msgpack.encode(row)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a lone surrogate, 2**64, deep nesting
        remedy = f"It cannot be stored in a recording: {type(error).__name__}: {error}."
        raise ConfigError(field, where, remedy) from None


def check_row(config: TaskConfig, row: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a row of a FileTask that lacks a field, or whose prompt is invalid."""
    for name in ("prompt_key", "answer_key", "image_key"):
        if (key := getattr(config, name)) is not None and not _lifted(row, key):
            raise ConfigError(f"task.{name}", key, f"{where} has only the fields {sorted(row)}; {COUNTED}.")
    prompt = row[config.prompt_key]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not turns or not are_messages(turns):
        form = "it must be a text, or a list of messages with role and content"
        remedy = f"{where} has {prompt!r:.80}: {form}; {COUNTED}."
        raise ConfigError("task.prompt_key", config.prompt_key, remedy)


def _lifted(row: dict[str, Any], key: str) -> bool:
    """Return whether a row has the field. That of an object in the row, as verl's reward_model.ground_truth, becomes
    one of the row, with the dots in its name."""
    inner: Any = row
    for name in () if key in row else key.split("."):
        if not isinstance(inner, dict) or name not in inner:
            return False
        inner = inner[name]
    row.setdefault(key, inner)
    return True
