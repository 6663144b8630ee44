"""Questions of your own, from JSONL or parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config import Task as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question
from asyncrl.tasks.chats import head


class FileTask:
    """Rows of a file; evaluation rows come first when they are in a file of their own (see `held_out`)."""

    inline = True

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        evaluation = _rows("task.eval_file", config.eval_file) if config.eval_file else []
        training = _rows("task.train_file", config.train_file) if config.train_file is not None else []
        self.held_out = len(evaluation)  # questions 0..held_out-1 are the evaluation file's
        self._rows = [*evaluation, *training]
        for number, row in enumerate(self._rows):
            for key in (config.prompt_key, config.answer_key):
                if key not in row:
                    raise ConfigError(
                        "task.prompt_key / task.answer_key",
                        key,
                        f"Row {number} has only the fields {sorted(row)}.",
                    )
        self._head = head(config.system)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def question(self, index: int) -> Question:
        """Row `index`; a text becomes one user message, a list of messages is taken as it is."""
        row = self._rows[index]
        prompt = row[self._config.prompt_key]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return {"messages": [*self._head, *messages], "row": row}

    def score(self, answer: str, question: Question) -> float:
        """Files hold no reward: task.reward names one (asyncrl/tasks/scores.py)."""
        raise NotImplementedError

    def correct(self, reward: float) -> bool:
        """A reward of 1 or more."""
        return reward >= 1.0


def _rows(field: str, path: str) -> list[dict[str, Any]]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(field, path, "No such file.")
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    elif file.suffix in (".jsonl", ".json"):
        rows = []
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ConfigError(field, f"{path}, line {number}", f"Not JSON: {error}.") from None
    else:
        raise ConfigError(field, path, "Must end in .jsonl or .parquet.")
    if not rows:
        raise ConfigError(field, path, "The file has no rows.")
    return rows
