"""Writer of the trainer's log-probabilities of recorded batches, from which the gap of every token is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from asyncrl.records.events import scored
from asyncrl.records.reading import RECORDS, TRAINER
from asyncrl.records.writer import Writer


class ScoreWriter:
    """Writes the scores, on rank 0. If writing fails, the run continues and warns once."""

    def __init__(self, run_dir: Path, warn: Callable[[str, int], None]) -> None:
        self._writer, self._warn, self._warned = Writer(run_dir / RECORDS / TRAINER), warn, False

    def write(self, step: int, logprobs: Tensor) -> None:
        """Write the log-probabilities of a batch's tokens, [N]."""
        self._writer.write(scored(step, logprobs.tolist()))
        if self._writer.failed and not self._warned:
            self._warned = True
            self._warn(f"{self._writer.failed}. The run continues without it.", step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
