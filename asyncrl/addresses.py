"""Where the processes of a run are: written once by the launcher, read by everyone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "addresses.json"
READY = "ready"
"""Appears in the run folder when the router routes to every engine."""
LOST = "lost.jsonl"
"""There the trainer writes which engines it has given up, and the launcher starts them again."""


@dataclass(frozen=True)
class Addresses:
    """URLs, the run's identity, and the resolved model folder."""

    run_id: str
    api_key: str
    model: Path
    engines: tuple[str, ...]
    router: str
    rollout: str
    gpus: int
    started_at: float  # time.time() of the command
    teacher: Path | None = None
    teachers: tuple[str, ...] = ()  # engines of the teacher, whoever started them

    def write(self, run_dir: Path) -> None:
        """Readable by the owner only: it holds the run's API key."""
        descriptor = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            teacher = str(self.teacher) if self.teacher else None
            json.dump({**asdict(self), "model": str(self.model), "teacher": teacher}, file, indent=2)

    @classmethod
    def read(cls, run_dir: Path) -> Addresses:
        """The inverse of `write`."""
        values = json.loads((run_dir / FILE).read_text())
        paths = {name: Path(values[name]) if values[name] else None for name in ("model", "teacher")}
        return cls(**{**values, **paths, **{name: tuple(values[name]) for name in ("engines", "teachers")}})

    @property
    def headers(self) -> dict[str, str]:
        """What every request of the run carries."""
        return {"Authorization": f"Bearer {self.api_key}"}
