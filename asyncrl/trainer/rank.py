"""What the parts of a trainer rank share: its settings, its place among the ranks, and its deadlines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from asyncrl import jsonl
from asyncrl.config import Config, on_gpu, read
from asyncrl.errors import DeadlineExceeded, visible
from asyncrl.network.addresses import READY, Addresses
from asyncrl.observability.timeline import Phases
from asyncrl.parallel import Parallel
from asyncrl.progress import Progress
from asyncrl.trainer import recovery
from asyncrl.trainer.parallel import initialize

TIMEOUT_MARGIN = 120.0  # seconds: the collectives of the other ranks time out this long after rank 0's own deadline
DOING = {
    "start": "starting",
    "wait_batch": "waiting for a batch",
    "train": "training",
    "publish": "publishing weights",
    "save": "saving a checkpoint",
    "end": "ending the run",
}


@dataclass(frozen=True)
class Rank:
    """One rank of a run's trainers."""

    config: Config
    addresses: Addresses
    run_dir: Path
    parallel: Parallel
    progress: Progress
    begins: Callable[[str, int], None]
    """Marks the start of each part of a step."""
    warn: Callable[[str, int], None]
    """Warns on the console and in warnings.jsonl, of a version."""
    phases: Phases

    @property
    def timeout(self) -> float:
        """Return the seconds that a collective may take."""
        return longest_wait(self.config) + TIMEOUT_MARGIN

    def wait_for_engines(self) -> None:
        """Wait until the router routes to every engine. Raises DeadlineExceeded."""
        file, seconds = self.run_dir / READY, self.config.engine.start_timeout
        deadline = time.monotonic() + seconds
        while not file.exists():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the engines ({file} is missing)", seconds)
            time.sleep(0.1)


def join(run_dir: Path) -> Rank:
    """Join the run's process group."""
    addresses = Addresses.read(run_dir)
    config, changed = recovery.adapted(read(run_dir), run_dir)
    gpu = on_gpu(config.trainer, addresses.gpus)
    longest = longest_wait(config)
    progress, begins = watched(config, run_dir, longest + TIMEOUT_MARGIN / 2, gpu=gpu)
    parallel = initialize(config.trainer, gpu=gpu, seed=config.run.seed, timeout=longest + TIMEOUT_MARGIN)
    limit(config, gpu=gpu)
    warn = partial(_warn, run_dir)
    if changed and parallel.is_first:
        warn(changed, 0)
    phases = Phases(config, run_dir, f"trainer {parallel.rank}", lambda text: warn(text, 0))
    return Rank(config, addresses, run_dir, parallel, progress, begins, warn, phases)


def limit(config: Config, *, gpu: bool) -> None:
    """Limit this process to its part of a GPU that it shares, and to deterministic algorithms, if the settings do."""
    if gpu and config.trainer_fraction:
        # A rank that needs more gets torch's own error, and the engine beside it keeps its memory.
        torch.cuda.set_per_process_memory_fraction(config.trainer_fraction)
    if config.deterministic:  # a call, even with False, imports torch's compiler in 1 CPU second
        torch.use_deterministic_algorithms(True)


def longest_wait(config: Config) -> float:
    """Return the most seconds that rank 0 waits for others within a part of a step: for a batch, or for engines. Those
    that use the trainers' GPUs may have to be paused and to release their memory before and after the wait for those
    that are being restarted."""
    engines = config.engine.start_timeout + (4 * config.weights.timeout if config.cluster.shares_gpus else 0.0)
    return max(config.rollout.batch_timeout, engines, config.weights.timeout)


def watched(config: Config, run_dir: Path, longest: float, *, gpu: bool) -> tuple[Progress, Callable[[str, int], None]]:
    """Return this rank's progress reporter and a callback that marks the start of each part of a step. Training has the
    default deadline, except that the first step on a GPU also compiles kernels. That step gets `longest` seconds for
    each micro-batch, and so does every other part, which waits for processes that have their own deadlines."""
    progress = Progress(run_dir, f"trainer-{os.environ['RANK']}", config.cluster.stall_timeout)
    compiles = gpu

    def begins(span: str, step: int) -> None:
        nonlocal compiles
        progress.doing(
            f"step {step}, {DOING.get(span, span)}", within=None if span == "train" and not compiles else longest
        )
        compiles = compiles and span != "train"

    begins("start", 0)
    progress.watch()
    return progress, begins


def _warn(run_dir: Path, text: str, version: int) -> None:
    print(visible(text), file=sys.stderr, flush=True)
    jsonl.append(run_dir / "warnings.jsonl", {"version": version, "warning": text})
