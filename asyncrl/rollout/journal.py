"""What the rollout process writes down for processes that die: the batches since the last two checkpoints, as the
trainers got them, and its own newest state.

    RUN/journal/VERSION-PART   a part of a batch. Trainers that die start again from a checkpoint and train these once
                               more (trainer/recovery.py), which makes the same weights
    RUN/journal/state          the newest snapshot (snapshot.py), which knows of every batch that a trainer got. A
                               rollout process that dies starts again from it
    RUN/journal/served         the newest version that was announced, and whether requests are held back for the next

on failure    (a full disk) a warning, and nothing more is kept: the next death of a trainer, or of this process, ends
              the run
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.engine.inflight import InFlight
from asyncrl.errors import RecordError

if TYPE_CHECKING:
    from asyncrl.rollout.snapshot import GroupsState, ResumableGroups

FOLDER = "journal"
STATE, SERVED = "state", "served"
KEPT = 2
"""Checkpoints whose batches are kept: the newest one may turn out to be damaged."""
KEEP_SECONDS, KEEP_SHARE = 5.0, 0.02
"""Seconds between two snapshots for the journal, and the largest share of the event loop's time: what was generated
since the newest one is lost if this process dies."""


@dataclass(frozen=True)
class Left:
    """What a rollout process that died has left."""

    state: bytes | None = None
    """None if it had not begun."""
    written: float = 0.0
    """When the state was written, in seconds since the epoch."""
    served: int | None = None
    held: bool = False
    """Whether the engines may be in an update."""


class NoJournal:
    """Keeps nothing."""

    enabled = False
    left = Left()

    def keep(self, version: int, part: int, data: bytes) -> None:
        """Do nothing."""

    def read(self, version: int, part: int) -> bytes | None:
        """Return nothing."""
        return None

    def keep_state(self, data: bytes) -> None:
        """Do nothing."""

    def serves(self, version: int, *, held: bool) -> None:
        """Do nothing."""


class Journal(NoJournal):
    """The folder RUN/journal."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None], *, restarted: bool = False) -> None:
        """Start with an empty folder, because a run that resumes makes its batches anew, or, if this process died and
        is `restarted`, with what it has left. Raises RecordError if nothing was kept."""
        self._folder, self._warn, self.enabled = run_dir / FOLDER, warn, True
        self._store = CheckpointStore(run_dir)
        if not restarted:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        elif not self._folder.exists():
            raise RecordError(f"{self._folder} was not kept, so the rollout process cannot go on: set resume=auto")
        else:
            self.left = self._read_left()

    def _read_left(self) -> Left:
        for file in self._folder.glob("unfinished-*"):
            file.unlink()
        state, served = self._folder / STATE, self._folder / SERVED
        data, written = (state.read_bytes(), state.stat().st_mtime) if state.exists() else (None, 0.0)
        if not served.exists():
            return Left(data, written)
        version, *held = served.read_text().split()
        return Left(data, written, int(version), held=bool(held))

    def keep(self, version: int, part: int, data: bytes) -> None:
        """Keep an encoded part of a batch, before any trainer gets it, and remove what no trainer needs any more."""
        self._write(self._name(version, part), data)
        oldest = min(self._store.versions()[-KEPT:], default=0)
        for file in self._folder.glob("[0-9]*"):
            if int(file.name.partition("-")[0]) < oldest:
                file.unlink(missing_ok=True)  # a repeated request may do the same at this moment

    def read(self, version: int, part: int) -> bytes | None:
        """Return a part that was kept; None if it was not."""
        file = self._folder / self._name(version, part)
        return file.read_bytes() if file.exists() else None

    def keep_state(self, data: bytes) -> None:
        """Replace the state."""
        self._write(STATE, data)

    def serves(self, version: int, *, held: bool) -> None:
        """Record the newest version that was announced, and whether requests are held back since."""
        self._write(SERVED, f"{version} {'held' if held else ''}".encode())

    def _write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        if not self.enabled:
            return
        try:
            unfinished = self._folder / f"unfinished-{secrets.token_hex(8)}"
            unfinished.write_bytes(data)
            unfinished.rename(self._folder / name)
        except OSError as error:
            self.enabled = False
            shutil.rmtree(self._folder, ignore_errors=True)
            what = "the next death of a trainer or of the rollout process ends the run"
            self._warn(f"batches and the state of the rollouts are no longer kept, so that {what}: {error}")

    def _name(self, version: int, part: int) -> str:
        return f"{version:08d}-{part:04d}"


class StateKeeper:
    """Takes snapshots of the rollouts, for the journal and for checkpoints."""

    def __init__(
        self,
        groups: ResumableGroups,
        inflight: InFlight,
        journal: NoJournal,
        save: Callable[[GroupsState, int], bytes] | None,
        number: int,
    ) -> None:
        """`save` encodes a snapshot that includes the state, and its number; without it none is taken. `number` is that
        of the snapshot with which this process has begun."""
        self._groups = groups
        self._inflight = inflight
        self._journal = journal
        self._save = save
        self._number = number
        self.lock = asyncio.Lock()  # no snapshot is taken within a publish

    async def snapshot(self, version: int) -> bytes | None:
        """Return a snapshot for a checkpoint, after everything recorded so far is flushed; None unless this version is
        published and its batch not begun."""
        await self._inflight.gathered()
        if self._save is None or not self._groups.between_batches(version):
            return None
        data = self._save(self._groups.state(), 0)
        await self._groups.saved(version)
        return data

    async def keep(self) -> float:
        """Write down the state for the case that this process dies. Returns the event loop's seconds."""
        if self._save is None or not self._journal.enabled:
            return 0.0
        async with self.lock:
            await self._inflight.gathered()
            began = time.thread_time()
            self._number += 1
            data = self._save(self._groups.state(), self._number)
            spent = time.thread_time() - began
            await self._groups.saved(self._groups.published_version, self._number)
            await asyncio.to_thread(self._journal.keep_state, data)
        return spent

    async def keep_regularly(self) -> None:
        """Write down the state from time to time, until cancelled."""
        while True:
            spent = await self.keep()
            await asyncio.sleep(max(KEEP_SECONDS, spent / KEEP_SHARE))
