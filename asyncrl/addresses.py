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

    def write(self, run_dir: Path) -> None:
        """Readable by the owner only: it holds the run's API key."""
        descriptor = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**asdict(self), "model": str(self.model)}, file, indent=2)

    @classmethod
    def read(cls, run_dir: Path) -> Addresses:
        """The inverse of `write`."""
        values = json.loads((run_dir / FILE).read_text())
        return cls(**{**values, "model": Path(values["model"]), "engines": tuple(values["engines"])})

    @property
    def headers(self) -> dict[str, str]:
        """What every request of the run carries."""
        return {"Authorization": f"Bearer {self.api_key}"}
