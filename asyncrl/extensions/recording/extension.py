"""What this folder adds: recordings of runs with record=true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.observability.timeline import RecordListener


class RecordingExtension(extension.Extension):
    """Recordings of groups and batches."""

    trains = False
    enables = ("record",)
    metrics = {  # noqa: RUF012
        "time/recording": "time that recording took in the rollout process since the previous step",
        "recording/bytes": "bytes written to the recording since the previous step",
    }
    """They are there with record=true."""

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.recording.recorder import Recorder

        return Recorder()

    def phases(self, config: Config, run_dir: Path, process: str, warn: Callable[[str], None]) -> RecordListener | None:
        """Return what records the trainer's scores of batches, on rank 0."""
        if not (config.record and config.mode == "train" and process == "trainer 0"):
            return None
        from asyncrl.extensions.recording.recorder import ScoreRecorder

        return ScoreRecorder(run_dir, warn)


Own = RecordingExtension
