"""Where step records go besides metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from asyncrl.metrics.record import Step


class TensorBoard:
    """Event files in tb/."""

    def __init__(self, folder: Path, first: int | None = None) -> None:
        """`first`: the step that a run goes on with; what the folder holds of it and later ones is not shown."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first)

    def __call__(self, record: Step) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()
