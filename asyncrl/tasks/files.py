"""Questions from a user's JSONL or parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.tasks import Question, Task, head
from asyncrl.tasks.rows import check_row, rows_of_file


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
        check_row(self._config, row, where)

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
