"""Where step records go: metrics.jsonl always, TensorBoard on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.metrics.record import Step


class JsonLines:
    """One object per line, flushed: a reader may follow the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def __call__(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class TensorBoard:
    """Event files in tb/."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def __call__(self, record: Step) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()
