"""Sinks of step records besides metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from asyncrl.metrics.record import Step


class TensorBoard:
    """Sink that writes TensorBoard event files to tb/."""

    def __init__(self, folder: Path, first: int | None = None) -> None:
        """Open the event files. `first` is the step that a resumed run continues with; recorded events from that step
        on are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first)

    def __call__(self, record: Step) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()
