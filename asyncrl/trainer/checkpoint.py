"""Checkpoints of a run: the state of the trainers at a version, with the rollout side at the same version.

    stall      the state is copied to host memory and the rollout side sends its own; then the next step may begin
    write      a thread of each rank writes its shards, flushes them to disk and computes their checksums
    commit     rank 0 writes the manifest when every rank is done, and removes checkpoints that need not be kept

waits for     the previous checkpoint, if it is still being written when the next one is due
deadline      checkpoint.timeout
on failure    (a full disk, for example) a warning; the run continues and earlier checkpoints stay intact
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import COUNTERS, EXTENSIONS, ROLLOUT, FileEntry, Manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.checkpoints.torch_dist import METADATA, write_frame
from asyncrl.errors import DeadlineExceeded, RecordError
from asyncrl.metrics.record import StepLog
from asyncrl.network.addresses import times_restarted
from asyncrl.parallel import from_all, from_first
from asyncrl.trainer import recovery, sharded
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.policy_state import PolicyState
from asyncrl.trainer.rank import Rank
from asyncrl.trainer.sharded import StagedCopy
from asyncrl.weights.publish import VersionPublisher


@dataclass
class _Work:
    """A checkpoint that is being written."""

    version: int
    files: dict[str, bytes]  # complete contents by file name; only on rank 0
    thread: threading.Thread | None = None
    problem: str | None = "its thread died"  # set until everything is written
    began: float = field(default_factory=time.monotonic)


class Checkpoints:
    """The checkpoints of one rank: the one that a run resumes, and those that it writes."""

    def __init__(
        self,
        rank: Rank,
        state: PolicyState,
        *,
        counters: Callable[[], dict[str, Any]],
        snapshot: Callable[[int], bytes],
    ) -> None:
        """Allocate the staging memory. `counters` returns the loop's counters for trainer.json; `snapshot` asks the
        rollout side for its state, on rank 0."""
        self._rank = rank
        self._settings = rank.config.checkpoint
        self._store = CheckpointStore(rank.run_dir)
        self._parallel = rank.parallel
        self._state = state
        self._counters = counters
        self._snapshot = snapshot
        self._staged: dict[str, StagedCopy] = {}
        self._work: _Work | None = None
        self._size = 0
        self._begun = -1
        self._base: str | None = None
        self.failed = 0
        """Number of checkpoints that could not be written."""
        self.last = -1
        """Version of the last one that was."""
        timeout = timedelta(seconds=self._settings.timeout)
        parallel_run = self._settings.every and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if parallel_run else None
        if self._settings.every:
            self._prepare()

    def resumed(self, version: int) -> None:
        """Record that the run resumed from a checkpoint of this version, which needs no other."""
        self._begun = self.last = version

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore the policy from a checkpoint written under any layout, and return the loop's counters. Raises
        RecordError, also if it is that of another frozen model."""
        state = self._state
        if self._parallel.is_first and (before := manifest.read(folder).base) != state.base_hash:
            raise RecordError(
                f"{folder} is of a frozen base with the hash {before}, but the weights in {state.folder} have "
                f"{state.base_hash}: set model.path to that base"
            )
        for name, part in state.sharded().items():
            part.load(folder / name)
        try:
            counters: dict[str, Any] = json.loads((folder / COUNTERS).read_bytes())
            file = folder / EXTENSIONS
            states = msgspec.msgpack.decode(file.read_bytes(), type=dict[str, bytes]) if file.exists() else {}
            state.restore(counters["policy"], states)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder} cannot be read: {type(error).__name__}: {error}") from None
        return counters

    def save(self, version: int) -> None:
        """Start writing a checkpoint, unless checkpoint.every is unset or this version already has one."""
        if not self._settings.every or version == self._begun:
            return
        self._begun = version
        self.finish()
        if problem := self._from_first(lambda: self._room_for(version)):
            self._fail(version, problem)
            return
        work = _Work(version, self._from_rollout_and_loop(version) if self._parallel.is_first else {})
        for name, part in self._state.sharded().items():
            self._staged[name].copy(list(part.written()))
        work.thread = threading.Thread(target=self._write, args=(work,), name="checkpoint", daemon=True)
        work.thread.start()
        self._work = work

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete or has failed. Raises DeadlineExceeded."""
        if (work := self._work) is None:
            return
        assert work.thread is not None
        work.thread.join(max(0.0, self._settings.timeout - (time.monotonic() - work.began)))
        if work.thread.is_alive():
            raise DeadlineExceeded(f"checkpoint {work.version} to be written", self._settings.timeout)
        self._work = None
        if work.problem:
            self._fail(work.version, work.problem)
        else:
            self.last = work.version

    def figures(self) -> dict[str, Any]:
        """Return the statistics for summary.json."""
        if not self._settings.every:
            return {}
        return {"checkpoint/last": self.last, "checkpoint/failed": self.failed, "recoveries": times_restarted()}

    # -- in the training loop ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Allocate memory for the copies, and compute how many bytes all ranks will write together, and the hash of the
        base, while the engines start."""
        if self._parallel.is_first:
            self._base = self._state.base_hash
        for name, part in self._state.sharded().items():
            self._staged[name] = StagedCopy(list(part.written()))
        self._size = sum(from_all(sum(staged.nbytes for staged in self._staged.values()), self._group))

    def _room_for(self, version: int) -> str | None:
        """Create an empty folder, or return the reason why that is impossible."""
        try:
            if problem := self._store.lacks(self._size):
                return problem
            self._store.make_room(version)
        except OSError as error:
            return _reason(error)
        return None

    def _from_rollout_and_loop(self, version: int) -> dict[str, bytes]:
        counters = {**self._counters(), "policy": self._state.counters()}
        files = {COUNTERS: json.dumps(counters).encode()}
        if states := self._state.of_extensions():
            files[EXTENSIONS] = msgspec.msgpack.encode(states)
        rollout = self._snapshot(version)
        return {**files, ROLLOUT: rollout} if rollout else files

    def _from_first(self, ask: Callable[[], str | None]) -> str | None:
        """Return rank 0's answer on every rank."""
        return from_first(ask() if self._parallel.is_first else None, self._group)

    def _fail(self, version: int, problem: str) -> None:
        self.failed += 1
        if self._parallel.is_first:
            text = f"checkpoint {version} could not be written; the run continues without it: {problem}"
            self._rank.warn(text, version)

    # -- in the writer thread ------------------------------------------------------------------------------

    def _write(self, work: _Work) -> None:
        folder = self._store.path(work.version)
        try:
            written: dict[str, FileEntry] | str = self._write_mine(work, folder)
        except (CheckpointException, OSError, RuntimeError) as error:
            written = _reason(error)
        try:
            everyone: list[Any] = from_all(written, self._group)
            problems = [one for one in everyone if isinstance(one, str)]
            work.problem = problems[0] if problems else self._from_first(lambda: self._commit(work, folder, everyone))
        except (OSError, RuntimeError) as error:
            work.problem = _reason(error)
        if work.problem and self._parallel.is_first:
            self._store.remove(folder)

    def _write_mine(self, work: _Work, folder: Path) -> dict[str, FileEntry]:
        names = []
        for name, staged in self._staged.items():
            part = folder / name
            sharded.write(part, staged.pieces, self._group)
            names += [f"{name}/{file.name}" for file in part.glob(f"__{self._parallel.rank}_*")]
            if self._parallel.is_first:
                write_frame(part, work.version)
                names += [f"{name}/{file}" for file in (METADATA, "metadata.json", "common.pt")]
        for name, content in work.files.items():
            (folder / name).write_bytes(content)
        return manifest.describe(folder, [*names, *work.files])

    def _commit(self, work: _Work, folder: Path, written: list[dict[str, FileEntry]]) -> str | None:
        """Write the manifest, which turns the files of all ranks into a checkpoint. Returns the reason if that
        fails."""
        files = {name: entry for one in written for name, entry in one.items()}
        config = json.loads(self._rank.config.model_dump_json())
        run_id = self._rank.addresses.run_id
        whole = Manifest(manifest.FORMAT, work.version, run_id, time.time(), config, files, self._base)
        try:
            manifest.commit(folder, whole)
            self._store.prune(self._settings.keep_last, self._settings.keep_every)
        except OSError as error:
            return _reason(error)
        return None


class Saving:
    """Saves checkpoints and exports of the weights when they are due, on one rank."""

    def __init__(
        self,
        rank: Rank,
        policy: Policy,
        publisher: VersionPublisher,
        checkpoints: Checkpoints,
        log: StepLog,
        start: recovery.Start,
    ) -> None:
        self._rank = rank
        self._policy = policy
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._log = log
        self._start = start

    def after_step(self, version: int) -> None:
        """Save what is due at this version."""
        config = self._rank.config
        if config.trainer.save_hf_every and version % config.trainer.save_hf_every == 0:
            self._export(f"hf-{version:06d}", version)
        due = config.checkpoint.every and version % config.checkpoint.every == 0
        if due and not self._start.was_saved(version):
            with self._log.span("save"):
                self._publisher.finish()  # the rollout side is saved between a version and its batch
                self._checkpoints.save(version)

    def at_the_end(self, version: int, *, export: bool) -> None:
        """Save the last version, and export it unless the run is to be resumed."""
        self._publisher.finish()
        self._checkpoints.save(version)
        if export:
            self._export("hf", version)
        self._checkpoints.finish()

    def _export(self, name: str, version: int) -> None:
        """Save what is trained, as an HF folder unless an extension has another form."""
        rank, policy = self._rank, self._policy
        target, dtype = rank.run_dir / name, rank.config.trainer.dtype
        with self._publisher.parameters(version):
            policy.network.transformation.save(target, rank.addresses.model, policy.weights, rank.parallel, dtype)


def _reason(error: BaseException) -> str:
    """Describe an error in one line: torch's CheckpointException lists the failures of all ranks, of which the first is
    used."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
