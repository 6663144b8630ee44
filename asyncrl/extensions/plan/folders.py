"""Checks of the folders that a run writes to: permission, write speed and free space."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoints.store import FOLDER as CHECKPOINTS
from asyncrl.checkpoints.store import SPARE_BYTES
from asyncrl.config import Config
from asyncrl.extensions.plan.memory import CHECKPOINT
from asyncrl.extensions.plan.memory_check import gb
from asyncrl.extensions.plan.tensors import BYTES
from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.rollout.journal import KEPT

MEASURED = 64 << 20
"""Bytes written to measure the speed."""
RECORDED = 6
"""Bytes per token of a long answer in a recording (docs/runs.md)."""
JOURNALED = 14
"""Bytes per token in a batch that is kept for trainers that die, and in the state of the rollout process
(rollout/journal.py)."""
PUBLISHED = 3
"""Versions of the weights on disk at a time if they travel as files, with the one being written."""
FREE_UP = "Free some space, or choose a folder on a larger file system."


@dataclass(frozen=True)
class FolderState:
    """State of a folder."""

    path: Path
    problem: str = ""
    """Why it is not writable; empty: it is."""
    free: int = 0
    """Free bytes."""
    speed: float = 0.0
    """Bytes per second to the disk, for one writer."""
    checkpoints: int = 0
    """Bytes of existing checkpoints."""


def look_at(path: Path, size: int = MEASURED) -> FolderState:
    """Measure a folder by writing a file of this many bytes to it, or to its nearest existing parent. The file is
    removed."""
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir():
        return FolderState(path, f"{there} is a file")
    block = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".asyncrl-preflight-") as file:
            began = time.monotonic()
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - began
        held = sum(one.stat().st_size for one in (path / CHECKPOINTS).rglob("*") if one.is_file())
        free = shutil.disk_usage(there).free
    except OSError as problem:
        return FolderState(path, f"{there}: {problem.strerror}")
    return FolderState(path, "", free, size / max(seconds, 1e-6), held)


@dataclass(frozen=True)
class StoredBytes:
    """Sizes of what a run writes."""

    checkpoint: int
    folder: int
    """An HF folder: the weights, or the adapters."""
    base: int = 0
    """A quantized base, which all checkpoints share."""


@dataclass(frozen=True)
class SpaceNeeded:
    """Disk space that a run needs, in bytes."""

    checkpoint: int
    """One checkpoint."""
    checkpoints: int
    """All checkpoints that exist at a time."""
    weights: int
    """Weights written as HF folders."""
    published: int
    """Weights published as files."""
    recorded: int
    """Upper bound of the recording."""
    journal: int
    """Upper bound of what is kept for processes that die."""


def room_of(config: Config, elements: int, stored: StoredBytes | None = None) -> SpaceNeeded:
    """Return the disk space for a policy of this many parameters, all of which are trained unless `stored` says
    otherwise."""
    training, steps = config.trains, config.run.max_steps
    weights = elements * BYTES[config.trainer.dtype]
    stored = stored or StoredBytes(elements * CHECKPOINT * (1 + config.algo.has_critic), weights)
    one = stored.checkpoint if training else 0
    kept = config.checkpoint.keep_last + 1  # the oldest is removed once the newest is complete
    if config.checkpoint.every and config.checkpoint.keep_every:
        kept += sum(
            version % config.checkpoint.keep_every == 0 for version in range(0, steps + 1, config.checkpoint.every)
        )
    merged = weights if config.trainer.lora.rank and config.trainer.lora.save_merged else 0
    folders = 1 + (steps // config.trainer.save_hf_every if config.trainer.save_hf_every else 0)
    sizes = [config.group_size(name) for name in config.mixture]
    batch = config.rollout.batch_groups * max(sizes) * config.rollout.max_new_tokens  # tokens
    # since the last but one checkpoint; in the state, which is written beside the old one: in training and admitted
    batches = min(steps, KEPT * (config.checkpoint.every or 0)) + 2 * (config.rollout.effective_lead + 2)
    return SpaceNeeded(
        checkpoint=one,
        checkpoints=one * kept + stored.base if config.checkpoint.every else 0,
        weights=(stored.folder + merged) * folders if training else 0,
        published=weights * PUBLISHED if config.sends_files else 0,
        recorded=steps * batch * RECORDED if config.record else 0,
        journal=batches * batch * JOURNALED if config.recovers else 0,
    )


def check_folders(config: Config, room: SpaceNeeded, run: FolderState, shared: FolderState | None) -> list[Finding]:
    """Check the run folder and, if set, weights.folder."""
    here = {
        "checkpoints": max(0, room.checkpoints - run.checkpoints),
        "weights as HF folders": room.weights,
        "weights in transit": 0 if shared else room.published,
    }
    found = _check(run, "run.dir", here, {"recordings": room.recorded, "the journal": room.journal})
    if shared:
        found += _check(shared, "weights.folder", {"weights in transit": room.published}, {})
    if config.checkpoint.every and not run.problem and room.checkpoint:
        seconds = room.checkpoint / run.speed
        text = (
            f"a checkpoint takes {gb(room.checkpoint)} GB: {seconds:.1f} s for one writer at {run.speed / 1e6:.0f} MB/s"
        )
        remedy = "Raise checkpoint.timeout, or use a faster file system: a slower write is abandoned."
        slow = seconds > config.checkpoint.timeout * config.trainer.world_size
        found.append(warning("checkpoint.timeout", text, remedy) if slow else ok("checkpoint.every", text))
    return found


def _check(folder: FolderState, name: str, parts: dict[str, int], most: dict[str, int]) -> list[Finding]:
    """Check whether a folder has room for these parts, and for others that have at most these sizes."""
    if folder.problem:
        return [error(name, folder.problem, "Choose a writable folder.")]
    needed = sum(parts.values()) + SPARE_BYTES
    sizes = [f"{what} {gb(size)}" for what, size in parts.items() if size]
    told = ", ".join(sizes + [f"{what} up to {gb(size)}" for what, size in most.items() if size])
    text = f"{folder.path}: {gb(folder.free)} GB free, {folder.speed / 1e6:.0f} MB/s"
    text += f"; the run needs (GB): {told}" if told else ""
    if needed > folder.free:
        return [error(name, text, f"{gb(needed)} GB are needed. {FREE_UP}")]
    if needed + sum(most.values()) > folder.free:
        return [warning(name, text, f'What is given as "up to" may fill it. {FREE_UP}')]
    return [ok(name, text)]
