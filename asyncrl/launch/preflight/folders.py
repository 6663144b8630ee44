"""The folders that a run writes to: whether they can be written, how fast, and whether there is room."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoints.shelf import FOLDER as CHECKPOINTS
from asyncrl.checkpoints.shelf import SPARE_BYTES
from asyncrl.config import Config
from asyncrl.launch.preflight.findings import Finding, error, ok, warning
from asyncrl.planner.memory import BYTES, CHECKPOINT

MEASURED = 64 << 20
"""Bytes that are written to learn how fast."""
RECORDED = 6
"""Bytes of a token of a long answer in a recording (docs/records.md)."""
PUBLISHED = 3
"""Versions of the weights that disk and delta keep, and the one that is being written (weights/disk.py)."""
FREE_UP = "Free some of it, or name a folder on a larger file system."


@dataclass(frozen=True)
class Folder:
    """What was learnt of one."""

    path: Path
    problem: str = ""
    """Why it cannot be written; empty: it can."""
    free: int = 0
    """Bytes."""
    speed: float = 0.0
    """Bytes per second onto the disk, of one writer."""
    checkpoints: int = 0
    """Bytes of those that are there."""


def look_at(path: Path, size: int = MEASURED) -> Folder:
    """Writes a file of so many bytes into it, or into the nearest folder above it that there is, and removes it."""
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir():
        return Folder(path, f"{there} is a file")
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
        return Folder(path, f"{there}: {problem.strerror}")
    return Folder(path, "", free, size / max(seconds, 1e-6), held)


@dataclass(frozen=True)
class Room:
    """Bytes that a run needs on a disk."""

    checkpoint: int
    """One."""
    checkpoints: int
    """All that there are at once."""
    weights: int
    """HF folders of the weights."""
    published: int
    """By disk and delta."""
    recorded: int
    """No more than this."""


def room_of(config: Config, elements: int) -> Room:
    """For a policy of so many parameters."""
    training, steps = config.mode != "rollout_only", config.run.max_steps
    one = elements * CHECKPOINT * (1 + (config.algo.advantage == "gae")) if training else 0
    kept = config.checkpoint.keep_last + 1  # the oldest goes when the newest stands
    if config.checkpoint.every and config.checkpoint.keep_every:
        kept += sum(
            version % config.checkpoint.keep_every == 0 for version in range(0, steps + 1, config.checkpoint.every)
        )
    folders = 1 + (steps // config.trainer.save_hf_every if config.trainer.save_hf_every else 0)
    weights = elements * BYTES[config.trainer.dtype]
    sizes = [config.group_size(name) for name in config.mixture]
    tokens = steps * config.rollout.batch_groups * max(sizes) * config.rollout.max_new_tokens
    return Room(
        checkpoint=one,
        checkpoints=one * kept if config.checkpoint.every else 0,
        weights=weights * folders if training else 0,
        published=weights * PUBLISHED if config.weights.transport in ("disk", "delta") else 0,
        recorded=tokens * RECORDED if config.record else 0,
    )


def check_folders(config: Config, room: Room, run: Folder, shared: Folder | None) -> list[Finding]:
    """The run's folder and, where it is set, weights.folder."""
    here = {
        "checkpoints": max(0, room.checkpoints - run.checkpoints),
        "weights as HF folders": room.weights,
        "weights on their way": 0 if shared else room.published,
    }
    found = _check(run, "run.dir", here, room.recorded)
    if shared:
        found += _check(shared, "weights.folder", {"weights on their way": room.published}, 0)
    if config.checkpoint.every and not run.problem and room.checkpoint:
        seconds = room.checkpoint / run.speed
        text = f"one takes {_gb(room.checkpoint)} GB, about {seconds:.1f} s at {run.speed / 1e6:.0f} MB/s of one writer"
        remedy = "Raise checkpoint.timeout, or name a faster file system: it would be given up."
        slow = seconds > config.checkpoint.timeout * config.trainer.world_size
        found.append(warning("checkpoint.timeout", text, remedy) if slow else ok("checkpoint.every", text))
    return found


def _check(folder: Folder, name: str, parts: dict[str, int], recorded: int) -> list[Finding]:
    if folder.problem:
        return [error(name, folder.problem, "Name a folder that can be written.")]
    needed = sum(parts.values()) + SPARE_BYTES
    told = ", ".join(f"{what} {_gb(size)}" for what, size in parts.items() if size)
    told += f", recordings up to {_gb(recorded)}" if recorded else ""
    text = f"{folder.path}: {_gb(folder.free)} GB free, {folder.speed / 1e6:.0f} MB/s"
    text += f"; the run takes (GB) {told}" if told else ""
    if needed > folder.free:
        return [error(name, text, f"{_gb(needed)} GB are needed. {FREE_UP}")]
    if needed + recorded > folder.free:
        return [warning(name, text, f"Recordings may fill it. {FREE_UP}")]
    return [ok(name, text)]


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
