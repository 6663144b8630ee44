"""Where the processes of a run are: written once by the launcher, read by everyone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from asyncrl.access import Access

FILE = "addresses.json"
MACHINE = "machine.json"
"""There the launcher notes which dtype it chose for each part and why, and how long it expects the run to take."""
PATHS = ("model", "teacher", "judge", "resume")
TUPLES = ("engines", "teachers", "judges", "attached", "trainers")
READY = "ready"
"""Appears in the run folder when the router routes to every engine."""
STOP, STOPPED = "stop", "stopped"
"""The one appears there when the run is asked to end, with a checkpoint, and to go on later; the other when it has."""
PAUSED = 75
"""Exit code of the command then: EX_TEMPFAIL of sysexits.h."""
ARGUMENTS = "ASYNCRL_ARGUMENTS"
"""Environment variable of an engine or the router: further arguments of theirs, as a shell would have them."""
PEER_FAILED = 76
"""Exit code of a process that ends because another one of the run has failed: EX_PROTOCOL of sysexits.h."""
LOST = "lost.jsonl"
"""There the trainer writes which engines it has given up, and the launcher starts them again."""
RESTARTED = "restart-"
"""So begins what an engine says in place of a version until it has weights of the run (engine/serve.py)."""


@dataclass(frozen=True)
class Addresses:
    """URLs, the run's identity, and the resolved model folder."""

    run_id: str
    api_key: str
    model: Path
    engines: tuple[str, ...]  # that the launcher starts
    router: str
    rollout: str
    gpus: int
    started_at: float  # time.time() of the command
    teacher: Path | None = None
    teachers: tuple[str, ...] = ()  # engines of the teacher, whoever started them
    judge: Path | None = None
    judges: tuple[str, ...] = ()  # engines of the judge
    attached: tuple[str, ...] = ()  # engines of the policy that others have started (engine.urls)
    trainers: tuple[str, ...] = ()  # addresses of the machines of trainer ranks
    resume: Path | None = None  # the checkpoint that the run goes on from
    authority: str = ""  # the certificate, in PEM, that has signed those of its servers; empty: they have none

    def write(self, run_dir: Path) -> None:
        """Readable by the owner only: it holds the run's API key."""
        descriptor = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            paths = {name: str(path) if (path := getattr(self, name)) else None for name in PATHS}
            json.dump({**asdict(self), **paths}, file, indent=2)

    @classmethod
    def read(cls, run_dir: Path) -> Addresses:
        """The inverse of `write`."""
        values = json.loads((run_dir / FILE).read_text())
        paths = {name: Path(values[name]) if values[name] else None for name in PATHS}
        return cls(**{**values, **paths, **{name: tuple(values[name]) for name in TUPLES}})

    @cached_property
    def access(self) -> Access:
        """To its servers."""
        return Access(self.api_key, self.authority)
