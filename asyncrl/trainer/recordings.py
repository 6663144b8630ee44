"""The trainer's own log-probabilities of recorded batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from asyncrl.records.events import Scored, scored
from asyncrl.records.writer import RECORDS, TRAINER, Writer


class ScoreWriter:
    """Writes the scores, if `enabled`: on rank 0 of a recorded run. If writing fails, the run continues and warns
    once."""

    def __init__(self, run_dir: Path, warn: Callable[[str, int], None], *, enabled: bool) -> None:
        self._writer: Writer[Scored] | None = Writer(run_dir / RECORDS / TRAINER) if enabled else None
        self._warn = warn
        self._warned = False

    def write(self, step: int, logprobs: Callable[[], Tensor]) -> None:
        """Write the log-probabilities of a batch's tokens, [N]."""
        if self._writer is None:
            return
        self._writer.write(scored(step, logprobs().tolist()))
        if self._writer.failed and not self._warned:
            self._warned = True
            self._warn(f"{self._writer.failed}. The run continues without it.", step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer:
            self._writer.close()
