"""Questions from a user's JSONL or parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question, Task, head
from asyncrl.tasks.rows import rows_of_file

COUNTED = "rows are counted from 0"


class FileTask(Task):
    """Rows of a file; evaluation rows come first if they have a file of their own (see `held_out`)."""

    SOURCES = ("eval_file", "train_file")
    """Settings that name the evaluation rows and the training rows."""
    KEPT: Callable[[], Any] = list
    """What the rows are appended to, one after the other, and taken from by number."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._rows = self.KEPT()
        sizes = [self._keep(f"task.{name}", source) for name in self.SOURCES if (source := getattr(config, name))]
        self.held_out = sizes[0] if getattr(config, self.SOURCES[0]) else 0  # rows of the evaluation file come first
        self._head = head(config.system)

    def _keep(self, field: str, source: str) -> int:
        """Check and keep the rows that a setting names, and return their number. Raises ConfigError."""
        before = len(self._rows)
        for number, row in enumerate(self._read(field, source)):
            self._check(row, f"Row {number} of {field}")
            self._rows.append(row)
        return len(self._rows) - before

    def _read(self, field: str, source: str) -> Iterator[dict[str, Any]]:
        """Yield the rows that a setting names. Raises ConfigError."""
        return rows_of_file(field, source)

    def _check(self, row: dict[str, Any], where: str) -> None:
        """Raise ConfigError for a row that lacks a field, or whose prompt is invalid."""
        for name in ("prompt_key", "answer_key", "image_key"):
            if (key := getattr(self._config, name)) is not None and not _lifted(row, key):
                raise ConfigError(f"task.{name}", key, f"{where} has only the fields {sorted(row)}; {COUNTED}.")
        prompt = row[self._config.prompt_key]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(turns, list) or not turns or not all(_is_message(turn) for turn in turns):
            form = "it must be a text, or a list of messages with role and content"
            remedy = f"{where} has {prompt!r:.80}: {form}; {COUNTED}."
            raise ConfigError("task.prompt_key", self._config.prompt_key, remedy)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def question(self, index: int) -> Question:
        """Return row `index` with its messages; a list of messages is used as it is, a text becomes one of the user."""
        row = self._rows[index]
        prompt = row[self._config.prompt_key]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return {**row, "messages": [*self._head, *messages]}


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


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
